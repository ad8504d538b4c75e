"""Measure what a step costs within a memory budget: CPU seconds and the memory that it adds, on one thread.

python benchmarks/memory.py           # ResNet-20, 32x32, b 512, J 523 MiB: minutes
python benchmarks/memory.py --smoke   # a small network, seconds

Seconds and memory of each budget have a process of their own. The network is ResNetFixup on noise (SYNTHETIC).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from gramgn import GramGaussNewton, Stream  # noqa: E402
from gramgn.malloc import give_freed_blocks_back, keep_freed_blocks  # noqa: E402
from gramgn.models import ResNetFixup  # noqa: E402

BUDGETS_MIB, SMOKE_BUDGETS_MIB = (0, 256, 128), (0, 7)
STEPS = 7
COMPARED = (1, 2, 4)
"""Steps in which J is compared with autograd, and which cost more; the others count."""


def measure(depth: int, b: int, pixels: int, budget_mib: int, *, for_memory: bool) -> None:
    """Print CPU seconds of the first and of later steps, or the MiB that steps add at the peak; 0 MiB: no budget.

    Memory that is freed is given back where its peak is measured, which takes time, and kept as in training elsewhere.
    """
    (give_freed_blocks_back if for_memory else keep_freed_blocks)()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, budget = torch.randn(b, 3, pixels, pixels), budget_mib * 2**20 or None

    def build(engine: Stream) -> tuple[ResNetFixup, GramGaussNewton]:
        model = ResNetFixup(depth)
        return model, GramGaussNewton(model, lam=1.0, alpha=0.1, engine=engine)

    model, optimizer = build(Stream())
    optimizer.step(lambda: model(x[:8]) - 1)  # loads libraries
    del optimizer
    model, optimizer = build(Stream(memory_budget=budget))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    times = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(COMPARED[-1] if for_memory else STEPS):
            start = time.process_time()
            optimizer.step(lambda: model(x) - 1)
            times.append(time.process_time() - start)
    if for_memory:
        status = Path("/proc/self/status").read_text()
        added = int(status.split("VmHWM:")[1].split()[0]) * 1024 - before
        print(f"{added / 2**20:14.0f} MiB", flush=True)
        for warning in caught:
            print(f"           {str(warning.message).removeprefix('GramGaussNewton: ')}", flush=True)
        return
    plain_s = statistics.median(seconds for step, seconds in enumerate(times, 1) if step not in COMPARED)
    name = f"{budget_mib} MiB" if budget else "none"
    print(f"{name:10s} {times[0]:14.2f} {plain_s:14.2f}", end=" ", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small network, seconds")
    parser.add_argument(
        "--one", type=int, nargs=5, metavar=("DEPTH", "B", "PIXELS", "MIB", "FOR_MEMORY"), help="half a row"
    )
    options = parser.parse_args(arguments)
    if options.one:
        *shape, for_memory = options.one
        measure(*shape, for_memory=bool(for_memory))
        return 0
    shape = (8, 32, 16) if options.smoke else (20, 512, 32)
    print(
        f"ResNet-{shape[0]}, {shape[2]}x{shape[2]}, b {shape[1]}, float32, one thread, CPU seconds per step"
    )
    print(f"{'budget':10s} {'first step':>14s} {'later steps':>14s} {'memory added':>18s}", flush=True)
    for budget in SMOKE_BUDGETS_MIB if options.smoke else BUDGETS_MIB:
        for for_memory in (0, 1):
            command = [sys.executable, __file__, "--one", *map(str, (*shape, budget, for_memory))]
            subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
