"""Evaluate the network of a run on a split of the data it was trained on.

python scripts/evaluate.py run=outputs/runs/<run folder> split=test
python scripts/evaluate.py run=outputs/runs/<run folder> split=val checkpoint=last
python scripts/evaluate.py run=<folder> dataset.root=/data/rsna        # the raw data has moved
python scripts/evaluate.py run=<folder> format=json                    # for programs

run           a run's folder, below the current folder or the repository
split         test (default) | val | train
checkpoint    best (default; the lowest validation loss) | last
device        auto (default) | cpu | cuda | cuda:<n>
dataset.root  the folder of the raw data, where that is no longer the one recorded
format        text (default) | json

loss is the mean squared error of standardised targets, mae the mean absolute error in the data's unit. Data with
another manifest than the run's is rejected. Exit codes: 0 done, 2 rejected.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import CHECKPOINT_NAMES, choice, open_run, run_tool, shown  # noqa: E402

if TYPE_CHECKING:
    from gramgn.app import Result

EXAMPLE = 'python scripts/evaluate.py "run=outputs/runs/<run folder>" split=test'
DEFAULTS = {
    "run": None,
    "split": "test",
    "checkpoint": "best",
    "device": "auto",
    "dataset.root": "",
    "format": "text",
}


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 evaluated, 2 rejected."""
    return run_tool(evaluate, arguments, DEFAULTS, root=ROOT, help_text=str(__doc__), example=EXAMPLE)


def evaluate(words: dict[str, list[str]]) -> int:
    """Evaluate and print."""
    given = {key: values[0] for key, values in words.items()}
    split = choice("split", given["split"], ("test", "val", "train"))
    checkpoint = choice("checkpoint", given["checkpoint"], CHECKPOINT_NAMES)
    written = choice("format", given["format"], ("text", "json"))
    folder, root = open_run(given["run"]), given["dataset.root"]
    from gramgn.app import evaluate_run, load_trained  # loads torch

    trained = load_trained(folder, checkpoint=checkpoint, device=given["device"])
    result = evaluate_run(trained, split, root=str(Path(root).expanduser().absolute()) if root else None)
    as_json = json.dumps({"run": shown(folder.path), **asdict(result)}, indent=2)
    print(as_json if written == "json" else text(result, shown(folder.path)))
    return 0


def text(result: Result, run: str) -> str:
    """Return a result as lines for people."""
    lines = [
        f"run         {run}",
        f"checkpoint  {result.checkpoint}",
        f"data        {result.data} [{result.kind}], {result.split}",
        f"n           {result.n}",
        f"loss        {result.loss:.6g} (standardised targets)",
        f"mae         {result.mae:.6g} {result.unit}",
    ]
    if result.recorded is not None:
        loss, mae = result.recorded
        lines.append(f"recorded    loss {loss:.6g}, mae {mae:.6g} {result.unit}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
