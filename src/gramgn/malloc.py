"""What glibc's malloc does with large blocks that were freed.

By default a block of 32 MiB or more goes back to the system at once and comes back as pages of zeros, each paid
for by a fault when it is first written: at batch 128 and 64x64 that is a fifth of a training step on a CPU.
Elsewhere than on glibc, and where the environment has settings for malloc, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Numbers of options in malloc.h."""
NEVER = 2**31 - 1
OWN_BLOCKS_FROM = 1 << 17
"""Bytes; glibc's own threshold at the start of a process. Once set, it no longer grows."""
SETTINGS = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def keep_freed_blocks() -> bool:
    """Keep what is freed for the next step; return whether that was done."""
    return _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: NEVER})


def give_freed_blocks_back() -> bool:
    """Give every larger block back as soon as it is freed, so that the peak shows what is needed.

    Returns:
        Whether that was done.
    """
    return _set({M_MMAP_THRESHOLD: OWN_BLOCKS_FROM})


def release_kept_blocks() -> None:
    """Give back what is free now, so that a job's peak memory does not show what an earlier one used."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _set(options: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in options.items())
