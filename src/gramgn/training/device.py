"""The device: precision flags, memory format, clock edge, peak memory, and the state of random generators."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gramgn.errors import ConfigError, first_line
from gramgn.malloc import keep_freed_blocks, release_kept_blocks
from gramgn.training.config import TrainerConfig
from gramgn.training.data import TensorData
from gramgn.training.modes import evaluation_mode

MIB = 2**20


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `"auto"` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: `name` is not a device, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", name):
        raise ConfigError(f"trainer.device={name!r} must be auto, cpu, cuda, cuda:<n> or mps")
    device = torch.device(name)
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not present[device.type]:
        found = [kind for kind, is_there in present.items() if is_there]
        raise ConfigError(
            f"trainer.device={name!r} is not on this machine, which has: {', '.join(found)}; try device=auto"
        )
    return device


@dataclass(frozen=True)
class Precision:
    """The settings that were really in force, as recorded with the run.

    `channels_last` is determined last, once network and data exist; see `use_channels_last`.
    """

    dtype: str
    tf32: bool
    deterministic: bool
    float32_matmul_precision: str
    channels_last: bool = False


def apply_settings(config: TrainerConfig) -> Precision:
    """Set threads, memory, precision and determinism for this process and return what is in force.

    `deterministic=true` sets everything itself (T14): the algorithms, cuDNN, and cuBLAS's workspace, which
    cuBLAS reads when it starts. `false` turns all of it off again.
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
    """Wait until the device has finished its work, so that a clock read now is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class PeakMemory:
    """Peak memory of one job, reset on construction (T17).

    CUDA: the most that tensors held, from torch's allocator. CPU: the process's largest resident size, which can
    be reset on Linux; elsewhere it is the maximum since the process began.
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


def use_channels_last(model: nn.Module, data: TensorData, say: Callable[[str], None]) -> bool:
    """Put weights of four dimensions and the batches of images into `torch.channels_last`.

    A network that cannot take them (one with `x.view(...)` after a convolution, say) stays as it was.

    Args:
        model: The network, on its device.
        data: The data set, on the same device.
        say: Called with a message if the network does not take channels-last images.

    Returns:
        Whether the format is in force. It is not for data other than images [b, C, H, W].
    """
    if data.batch("train", slice(0, 1))[0].ndim != 4:
        return False
    _convert(model, torch.channels_last)
    data.memory_format = torch.channels_last
    try:
        _try_forward(model, data)
    except RuntimeError as error:
        _convert(model, torch.contiguous_format)
        data.memory_format = torch.contiguous_format
        say(
            f"note: {type(model).__name__} does not take channels-last images ({first_line(error)}); "
            "it gets contiguous ones, as with trainer.channels_last=false"
        )
        return False
    return True


def _convert(model: nn.Module, memory_format: torch.memory_format) -> None:
    # Not Module.to(memory_format=...): that fails on a parameter of five dimensions.
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _try_forward(model: nn.Module, data: TensorData) -> None:
    """Try two images in evaluation mode; the modes and the random state are restored."""
    before = rng_state()
    try:
        with evaluation_mode(model), torch.no_grad():
            model(data.batch("train", slice(0, 2))[0])
    finally:
        set_rng_state(before)


def seed_everything(seed: int) -> None:
    """Seed torch (every device), NumPy and Python. The pipeline itself draws from torch only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's own network may draw from the global generator
    torch.manual_seed(seed)


def epoch_order(num_samples: int, *, seed: int, epoch: int, order: str) -> torch.Tensor:
    """Return the order of the samples in an epoch: a function of its arguments and of nothing else.

    Args:
        num_samples: Number of samples in the training split.
        seed: The run's seed.
        epoch: The epoch, counted from 1.
        order: `"shuffle"` or `"cyclic"` (the same order, 0 to n - 1, in every epoch).

    Returns:
        Indices [num_samples], int64, on the CPU.
    """
    if order == "cyclic":
        return torch.arange(num_samples)
    digest = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(num_samples, generator=generator)


def rng_state() -> dict[str, Any]:
    """Return the state of every generator as tensors and plain Python types."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss_next],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore every generator to a state returned by `rng_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
