"""What malloc is told, in a process of its own: the setting cannot be taken back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys
from gramgn.malloc import keep_freed_blocks
if sys.argv[1] == "keep":
    print(keep_freed_blocks())
else:
    print("-")
def touch():
    block = bytearray(48 * 2**20)
    for i in range(0, len(block), 4096):
        block[i] = 1
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    """Return what keep_freed_blocks returned, and the page faults of allocating 48 MiB three times again."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told, number = done.stdout.split()
    return told, int(number)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_blocks_are_kept_unless_the_environment_says_otherwise() -> None:
    assert faults("keep") == ("True", pytest.approx(0, abs=1000))
    assert faults("leave")[1] > 10_000
    told, number = faults("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert told == "False"
    assert number > 10_000
