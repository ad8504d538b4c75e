"""Measure a step of Gram-Gauss-Newton beside one of SGD, torch.func, Opacus, BackPACK and others.

python scripts/bench_step.py                                       # the table of the README; minutes
python scripts/bench_step.py --shapes resnet:32x64 mlp:128 --paths ours vmap --breakdown
python scripts/bench_step.py --sweep --csv outputs/results/sweep.csv
python scripts/bench_step.py --device cuda --report                # what make gpu-report runs

One process, paths taking turns round by round; medians, ratios to SGD with momentum in its fastest memory
format, peak memory, error of the update against float64, targets. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks on stderr

import torch  # noqa: E402

from gramgn import bench  # noqa: E402
from gramgn.errors import InputError  # noqa: E402
from gramgn.malloc import keep_freed_blocks  # noqa: E402

SMOKE_SHAPES = ("resnet8:8x16", "mlp32:8")
SWEEP_PATHS = ("sgd", "sgd-cl", "ours", "ours-cl")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 measured, 2 bad input or no such device."""
    given = parser().parse_args(arguments)
    # Packages with backward hooks bring this about at the first layer; the hooks do what they should.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
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
    add("--shapes", nargs="+", metavar="SHAPE", help=f"default: {' '.join(bench.DEFAULT_SHAPES)}")
    add(
        "--paths", nargs="+", metavar="PATH", help=f"of: {' '.join(bench.PATHS)} (default: all but sgd-fused)"
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--rounds", type=whole, metavar="N", help="turns of each path (default: 11; with --smoke 2)")
    add("--threads", type=whole, metavar="N", help="torch's threads (default: torch's choice)")
    add("--limit-s", type=float, default=math.inf, metavar="S", help="begin no round after S seconds in all")
    add("--tf32", action="store_true", help="CUDA: let float32 products run in TF32")
    add("--sweep", action="store_true", help="instead: ResNet-32 at 32x32 over batch sizes, ours and SGD")
    add("--batches", nargs="+", type=whole, metavar="B", help="of the sweep (default: 16 to 1024)")
    add("--breakdown", action="store_true", help="split our step into its parts")
    add(
        "--kernels", action="store_true", help="time the kernels of the convolutions: what they allow at best"
    )
    add("--no-memory", action="store_true", help="leave the peak memory out")
    add(
        "--default-malloc",
        action="store_true",
        help="malloc as it is by default, for the times and for the peak memory",
    )
    add("--no-accuracy", action="store_true", help="leave the error against float64 out")
    add("--markdown", action="store_true", help="print tables to be pasted into a page")
    add("--csv", type=Path, metavar="FILE", help="write one row for each shape and path")
    add(
        "--report",
        action="store_true",
        help="CSV file outputs/results/gpu_step_<card>.csv, or cpu_step_<...>",
    )
    add("--smoke", action="store_true", help="tiny shapes, two rounds: only shows that all works")
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
    for option in ("breakdown", "kernels"):
        if getattr(given, option) and given.sweep:
            raise InputError(f"--{option} does not go with --sweep: measure the one, then the other")
    device = bench.find_device(given.device)
    shapes = chosen_shapes(given)
    paths = bench.choose_paths(given.paths or (SWEEP_PATHS if given.sweep else bench.DEFAULT_PATHS))
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    # As train.py does, for every path.
    kept = device.type == "cpu" and not given.default_malloc and keep_freed_blocks()
    machine = bench.describe(device, given.tf32, kept)
    file = given.csv
    if given.report and not file:
        kind = "gpu" if device.type == "cuda" else "cpu"
        file = ROOT / "outputs" / "results" / f"{kind}_step_{bench.safe(machine.device)}.csv"
    if file and file.is_dir():
        raise InputError(f"--csv {file}: that is a folder; name a file")
    settings = bench.Settings(
        device=device,
        threads=torch.get_num_threads(),
        rounds=given.rounds or (2 if given.smoke else 11),
        limit_s=given.limit_s / len(shapes),
        memory=not (given.no_memory or given.sweep),
        accuracy=not (given.no_accuracy or given.sweep),
        breakdown=given.breakdown,
        kernels=given.kernels,
        default_malloc=given.default_malloc,
    )
    print(bench.head_text(machine, given.markdown), flush=True)
    results = []
    for shape in shapes:
        results.append(bench.measure(shape, paths, settings, say))
        if not given.sweep:
            show(results[-1], given.markdown)
    finish(given, results, device)
    if file:
        bench.write_csv(file, bench.csv_rows(results, machine))
        print(f"\nwritten: {file}")


def chosen_shapes(given: argparse.Namespace) -> list[bench.Shape]:
    """Return the shapes to measure, of the sweep or of the table."""
    if given.sweep:
        batches = given.batches or ((2, 4, 8) if given.smoke else bench.BATCHES)
        return bench.sweep_shapes(batches, *((8, 16) if given.smoke else (32, 32)))
    default = SMOKE_SHAPES if given.smoke else bench.DEFAULT_SHAPES
    return [bench.Shape.parse(text) for text in given.shapes or default]


def show(result: bench.Result, markdown: bool) -> None:
    """Print what was measured at one shape."""
    print(f"\n{bench.shape_text(result, markdown)}", flush=True)
    if result.breakdown:
        print(f"\n{bench.breakdown_text(result, markdown)}", flush=True)
    if result.kernels:
        print(f"\n{bench.kernels_text(result, markdown)}", flush=True)


def finish(given: argparse.Namespace, results: list[bench.Result], device: torch.device) -> None:
    """Print what all shapes together show: the targets, or the fit of a sweep."""
    if given.sweep:
        seconds = bench.sweep_results(results)
        fits = {name: bench.fit_cost(of_b, results[0].num_params) for name, of_b in seconds.items() if of_b}
        title = results[0].shape.title.replace(f", batch {results[0].shape.batch}", "")
        print(f"\n{bench.sweep_text(seconds, fits, title, given.markdown)}")
        return
    targets = bench.evaluate(results, device.type)
    if targets:
        print(f"\n{bench.targets_text(targets, given.markdown)}")
        print(f"{bench.num_missed(targets)} of {len(targets)} targets missed")


def say(text: str) -> None:
    """Tell on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
