"""Peak memory of a path.

CPU: a fresh process for each path, so that nothing another path freed or kept is counted. It takes steps of the
same path on a tiny problem, so that all code is loaded, notes its resident size, resets the kernel's high-water
mark (Linux), makes the problem and takes three steps; the peak is the high-water mark less what was noted:
weights, batch, activations, J and workspaces. glibc's malloc is told to give every larger block back as soon as it
is freed: by default it keeps more of them the longer a process runs, and the mark then shows the holes between
blocks, which differ from run to run, rather than what a path needs. ``default_malloc`` leaves it as it is.

CUDA: the most that torch's allocator handed out in three steps, in this process, less what other paths hold.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path as File

import torch

from gramgn.bench._paths import PATHS
from gramgn.bench._problem import Shape, make_problem
from gramgn.malloc import give_freed_blocks_back

MIB = 2**20
NUM_STEPS = 3
LR = 2.0**-10
TINY = {"resnet": Shape("resnet", 8, 2, 8), "mlp": Shape("mlp", 8, 2, None)}
PRELOADED = ["torch", "torch._dynamo", "gramgn.bench"]
"""What the parent of the measuring processes imports; torch's first optimizer step asks for _dynamo."""


def peak_mib(
    path: str, variant: str, shape: Shape, device: torch.device, threads: int, default_malloc: bool = False
) -> float:
    """Return the peak memory in MiB that a path needs beyond an empty process with torch.

    Args:
        path: The path's name.
        variant: Its variant.
        shape: The problem.
        device: CPU or CUDA.
        threads: torch's threads.
        default_malloc: On the CPU: let malloc keep freed blocks as it does by default.
    """
    if device.type == "cuda":
        return _on_cuda(path, variant, shape, device)
    # A fork of a process that has imported torch but never run it: as fresh, without seconds of import.
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_in_fresh_process, path, variant, shape.text, threads, default_malloc).result()


def _in_fresh_process(path: str, variant: str, shape: str, threads: int, default_malloc: bool) -> float:
    if not default_malloc:
        give_freed_blocks_back()
    warnings.simplefilter("ignore")  # they are shown where the path is timed
    torch.set_num_threads(threads)
    whole = Shape.parse(shape)
    _take_steps(path, variant, TINY[whole.network], torch.device("cpu"))
    gc.collect()
    held = _resident_mib("VmRSS")
    _reset_high_water()
    _take_steps(path, variant, whole, torch.device("cpu"))
    return _resident_mib("VmHWM") - held


def _take_steps(path: str, variant: str, shape: Shape, device: torch.device) -> None:
    prepared = PATHS[path].build(make_problem(shape, device), LR, variant)
    for _ in range(NUM_STEPS):
        prepared.step()


def _on_cuda(path: str, variant: str, shape: Shape, device: torch.device) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    _take_steps(path, variant, shape, device)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - held) / MIB


def _reset_high_water() -> None:
    """Reset VmHWM; where the system does not allow it, the mark is that of a process that did nothing yet."""
    try:
        File("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"note: the peak counts from the start of the process ({error.strerror})", file=sys.stderr)


def _resident_mib(entry: str) -> float:
    """Return the resident size now (``VmRSS``) or its high-water mark (``VmHWM``)."""
    status = File("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{entry}:"):
                return int(line.split()[1]) / 1024
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024
