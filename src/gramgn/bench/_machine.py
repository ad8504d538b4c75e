"""The machine in words, without its name."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from gramgn.errors import InputError


@dataclass(frozen=True)
class Machine:
    """What the numbers depend on.

    Attributes:
        device: The card's name, or the processor's.
        text: One line for the head of a table.
    """

    device: str
    text: str


def find_device(name: str) -> torch.device:
    """Return the device called ``name``, ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: There is no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device on this machine; take --device cpu (make bench)")
    return torch.device(name)


def describe(device: torch.device, tf32: bool, keeps_blocks: bool = False) -> Machine:
    """Describe device, versions and the settings that matter for speed.

    Args:
        device: Where steps run.
        tf32: Whether products may run in TF32.
        keeps_blocks: Whether malloc was told to keep freed blocks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = f"{_processor()}, {cores} cores"
    threads = (
        f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'unset')}"
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type == "cuda":
        card = torch.cuda.get_device_name(device)
        flags = f"CUDA {torch.version.cuda}, TF32 {'on' if tf32 else 'off'}"
        return Machine(card, f"{card}, {flags}; {versions}; {processor}, {threads}")
    malloc = "freed blocks kept" if keeps_blocks else "malloc as it is"
    return Machine(_processor(), f"{processor}; {versions}; {threads}; {malloc}; float32")


def safe(name: str) -> str:
    """Return ``name`` in characters that any file system takes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
