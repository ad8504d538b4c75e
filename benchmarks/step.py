"""Measure a step of Gram-Gauss-Newton relative to one of SGD, torch.func, Opacus, BackPACK and others.

python benchmarks/step.py                                       # the tables of docs/performance.md; minutes
python benchmarks/step.py --shapes resnet:32x64 mlp:128 --paths ours vmap --breakdown
python benchmarks/step.py --sweep --csv outputs/results/sweep.csv
python benchmarks/step.py --device cuda --report                # the command of make gpu-report

All paths take turns in one process, round by round: SGD with ours first, then SGD with the others. Reported are
medians, ratios to SGD with momentum in its fastest form, peak memory, the error of the update relative to float64, and
which targets are met. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's remarks on stderr

import torch  # noqa: E402

from benchmarks import reporting  # noqa: E402
from benchmarks.measure import Settings, measure  # noqa: E402
from benchmarks.paths import PATHS, choose_paths  # noqa: E402
from benchmarks.problem import Shape  # noqa: E402
from benchmarks.targets import TARGETS  # noqa: E402
from gramgn.errors import InputError  # noqa: E402
from gramgn.malloc import keep_freed_blocks  # noqa: E402
from gramgn.optim.kernels import choose  # noqa: E402
from gramgn.records import processor_name  # noqa: E402

DEFAULT_SHAPES = tuple(TARGETS)
SMOKE_SHAPES = ("resnet8:8x16", "mlp32:8")
SWEEP_PATHS = ("sgd", "ours")
SWEEP_BATCHES = (16, 32, 64, 128, 256, 512, 1024)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 measured, 2 invalid input or no such device."""
    given = parser().parse_args(arguments)
    # Packages with backward hooks cause it at the first layer, where it does not matter.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings(
        "ignore", message="There is a performance drop"
    )  # torch.func's, shown by its time
    try:
        run(given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = options.add_argument
    add("--shapes", nargs="+", metavar="SHAPE", help=f"default: {' '.join(DEFAULT_SHAPES)}")
    add("--paths", nargs="+", metavar="PATH", help=f"of: {' '.join(PATHS)} (default: all)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--rounds", type=whole, metavar="N", help="number of turns of each path (default: 11; with --smoke 2)"
    )
    add("--threads", type=whole, metavar="N", help="number of torch's threads (default: torch's choice)")
    add(
        "--limit-s", type=float, default=math.inf, metavar="S", help="begin no round after S seconds in total"
    )
    add("--tf32", action="store_true", help="CUDA: let float32 products run in TF32")
    add("--sweep", action="store_true", help="instead: ResNet-32 at 32x32 over batch sizes, ours and SGD")
    add(
        "--batches", nargs="+", type=whole, metavar="B", help="batch sizes of the sweep (default: 16 to 1024)"
    )
    add("--breakdown", action="store_true", help="split our steps into their parts")
    add(
        "--convolutions",
        action="store_true",
        help="time SGD's and our products of the convolutions, layer by layer",
    )
    add("--csv", type=Path, metavar="FILE", help="write a CSV file with one row per shape and path")
    add(
        "--report",
        action="store_true",
        help="write the CSV file outputs/results/gpu_step_<card>.csv, or cpu_step_<processor>.csv",
    )
    add("--smoke", action="store_true", help="tiny shapes, two rounds: only a test that everything works")
    return options


def whole(text: str) -> int:
    """Return a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number of at least 1")
    return int(text)


def run(given: argparse.Namespace) -> None:
    """Check the input, measure, print and write.

    Raises:
        InputError: An unknown shape, path or device.
    """
    if not given.limit_s > 0:
        raise InputError(f"--limit-s {given.limit_s:g}: must be more than 0 seconds")
    if given.tf32 and given.device == "cpu":
        raise InputError("--tf32 is for --device cuda")
    for option in ("breakdown", "convolutions"):
        if getattr(given, option) and given.sweep:
            raise InputError(f"--{option} cannot be combined with --sweep: run the two one after the other")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device on this machine; use --device cpu (make bench)")
    device = torch.device(given.device)
    shapes = chosen_shapes(given)
    paths = choose_paths(given.paths or (SWEEP_PATHS if given.sweep else PATHS))
    file = given.csv
    if given.report and not file:
        kind = "gpu" if device.type == "cuda" else "cpu"
        name = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device)).strip("-")
        file = ROOT / "outputs" / "results" / f"{kind}_step_{name}.csv"
    if file and file.is_dir():
        raise InputError(f"--csv {file} is a folder; give the name of a file")
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    # As train.py does, for every path.
    kept = device.type == "cpu" and keep_freed_blocks()
    machine = describe(device, given.tf32, kept)
    settings = Settings(
        device=device,
        threads=torch.get_num_threads(),
        rounds=given.rounds or (2 if given.smoke else 11),
        limit_s=given.limit_s / len(shapes),
        memory=not given.sweep,
        accuracy=not given.sweep,
        breakdown=given.breakdown,
        convolutions=given.convolutions,
    )
    print(reporting.head_text(machine), flush=True)
    results = []
    for shape in shapes:
        result = measure(shape, paths, settings, lambda text: print(text, file=sys.stderr, flush=True))
        results.append(result)
        if not given.sweep:
            print(f"\n{reporting.result_text(result)}", flush=True)
    if given.sweep:
        print(f"\n{reporting.sweep_text(results)}")
    else:
        print(f"\n{reporting.summary_text(results, processor_name())}")
    if file:
        reporting.write_csv(file, results, device_name(device), machine)
        print(f"\nwritten: {file}")


def chosen_shapes(given: argparse.Namespace) -> list[Shape]:
    """Return the shapes to measure, of the sweep or of the table."""
    if given.sweep:
        batches = given.batches or ((2, 4, 8) if given.smoke else SWEEP_BATCHES)
        depth, pixels = (8, 16) if given.smoke else (32, 32)
        return [Shape("resnet", depth, b, pixels) for b in batches]
    default = SMOKE_SHAPES if given.smoke else DEFAULT_SHAPES
    return [Shape.parse(text) for text in given.shapes or default]


def describe(device: torch.device, tf32: bool, keeps_blocks: bool) -> str:
    """Return one line on everything that the times depend on.

    Args:
        device: CPU or CUDA.
        tf32: Whether products may run in TF32.
        keeps_blocks: Whether malloc keeps freed blocks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = f"{processor_name()}, {cores} cores"
    threads = (
        f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'unset')}"
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type == "cuda":
        flags = f"CUDA {torch.version.cuda}, TF32 {'on' if tf32 else 'off'}"
        return f"{device_name(device)}, {flags}; {versions}; {processor}, {threads}"
    malloc = "freed blocks kept" if keeps_blocks else "default malloc"
    return f"{processor}; {versions}; {threads}; {malloc}; kernels {choose('auto')}; float32"


def device_name(device: torch.device) -> str:
    """Return the name of the card, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


if __name__ == "__main__":
    raise SystemExit(main())
