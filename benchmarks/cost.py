"""Measure the parts of a step over batch sizes and numbers of parameters, for figure T5 of the theory.

python benchmarks/cost.py                               # into outputs/theory/theory_cost.csv: minutes, when idle
python benchmarks/cost.py --smoke --out /data/cost.csv  # tiny shapes, seconds

The networks are ResNetFixup on noise (SYNTHETIC). All shapes take turns, round by round. The columns are described in
outputs/results/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's remarks on stderr

import pandas as pd  # noqa: E402
import torch  # noqa: E402

from benchmarks.measure import Parts, time_parts  # noqa: E402
from benchmarks.problem import Shape  # noqa: E402
from gramgn.errors import InputError, counted  # noqa: E402
from gramgn.malloc import keep_freed_blocks  # noqa: E402
from gramgn.progress import track  # noqa: E402
from gramgn.records import git_state, processor_name, write_atomic  # noqa: E402

DEPTHS, BATCHES, PIXELS, ROUNDS = (8, 14, 20, 44), (16, 32, 64, 128, 256), 32, 7
SMOKE_DEPTHS, SMOKE_BATCHES, SMOKE_PIXELS, SMOKE_ROUNDS = (14,), (4, 8), 8, 2


def shapes(depth: int, depths: tuple[int, ...], batches: tuple[int, ...], pixels: int) -> list[Shape]:
    """Return shapes over b at one depth, over depths at one b, and one with images of twice the size."""
    over_b = [Shape("resnet", depth, b, pixels) for b in batches]
    over_m = [Shape("resnet", each, batches[-2], pixels) for each in depths]
    return [*over_b, *over_m, Shape("resnet", depth, batches[-2], 2 * pixels)]


def row(found: Parts) -> dict[str, object]:
    """Return the row of the CSV of one shape in one round."""
    b, m, parts = found.shape.batch, found.num_params, found.breakdown.parts
    return {
        "network": f"{found.shape.network}{found.shape.size}",
        "pixels": found.shape.pixels,
        "b": b,
        "m": m,
        "round": found.turn + 1,
        "step_s": found.breakdown.step_s,
        **{f"{name}_s": parts[name] for name in ("forward", "backward", "blocks", "gram", "solve", "update")},
        "sgd_s": found.sgd_s,
        "forward_ops": b * found.counts.forward,
        "gram_ops": float(b * b * m),
        "solve_ops": b**3 / 3,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 measured, 2 the file cannot be written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "theory" / "theory_cost.csv")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, two rounds")
    given = parser.parse_args(arguments)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    keep_freed_blocks()
    wanted = (
        shapes(8, SMOKE_DEPTHS, SMOKE_BATCHES, SMOKE_PIXELS)
        if given.smoke
        else shapes(32, DEPTHS, BATCHES, PIXELS)
    )
    rounds = SMOKE_ROUNDS if given.smoke else ROUNDS
    parts = time_parts(wanted, torch.device("cpu"), rounds)
    rows = [row(each) for each in track(parts, total=len(wanted) * rounds, label="cost", unit="steps")]
    state = git_state(ROOT)
    table = pd.DataFrame(rows).assign(
        device=f"{processor_name()}, {counted(torch.get_num_threads(), 'thread')}",
        torch=torch.__version__,
        git=(state["commit"] or "unknown")[:12] + ("+" if state["dirty"] else ""),
    )
    try:
        write_atomic(given.out, table.to_csv(index=False, float_format="%.7g", lineterminator="\n"))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
