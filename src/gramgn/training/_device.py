"""The device, its precision flags, its clock edge and its peak memory."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from gramgn.errors import ConfigError
from gramgn.malloc import keep_freed_blocks, release_kept_blocks
from gramgn.training._config import TrainerConfig

MIB = 2**20


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``; ``"auto"`` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: If the name is no device, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"trainer.device={name!r} must be auto, cpu, cuda, cuda:<n> or mps") from None
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if device.type not in present:
        raise ConfigError(f"trainer.device={name!r} must be auto, cpu, cuda, cuda:<n> or mps")
    if not present[device.type]:
        found = [kind for kind, is_there in present.items() if is_there]
        raise ConfigError(
            f"trainer.device={name!r} is not on this machine, which has: {', '.join(found)}; try device=auto"
        )
    return device


@dataclass(frozen=True)
class Precision:
    """What was really in force, as recorded with the run.

    ``channels_last`` is found out last, once network and data are there (:func:`use_channels_last`).
    """

    dtype: str
    tf32: bool
    deterministic: bool
    float32_matmul_precision: str
    channels_last: bool = False


def apply_settings(config: TrainerConfig) -> Precision:
    """Set threads, memory, precision and determinism for this process, in both directions, and say what holds.

    ``deterministic=true`` sets everything itself (T14): the algorithms, cuDNN, and cuBLAS's workspace, which
    cuBLAS reads when it starts. ``false`` really turns it off again.
    """
    keep_freed_blocks()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.deterministic = config.deterministic
    torch.backends.cudnn.benchmark = False  # a timing would choose the kernels, so that no run could repeat
    return Precision(
        dtype=config.dtype,
        tf32=config.tf32,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it, so that a clock read now is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class PeakMemory:
    """Peak memory of one job, reset when it is made (T17).

    CUDA: the most that tensors held, from torch's allocator. CPU: the process's largest resident size; Linux
    lets it be reset, elsewhere it is the maximum since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        release_kept_blocks()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif sys.platform == "linux":
            with suppress(OSError):  # some containers forbid it: then the peak is that of the process
                Path("/proc/self/clear_refs").write_text("5")

    def mib(self) -> float:
        """Return the peak since the start of the job, in MiB."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / MIB
        if sys.platform == "linux":
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        import resource  # POSIX only; at the top it would keep Windows from importing the package

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / MIB if sys.platform == "darwin" else peak / 1024


def release_memory() -> None:
    """Give back what a finished job held, so that the next one in this process starts as the first did (H11)."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code is kept by class: after some jobs torch would stop compiling
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
