"""Evaluate the network of a run on a split of the data it was trained on.

python scripts/evaluate.py run=outputs/runs/<run folder> split=test
python scripts/evaluate.py run=outputs/runs/<run folder> split=val checkpoint=last
python scripts/evaluate.py run=<folder> dataset.root=/data/rsna        # the raw data has moved
python scripts/evaluate.py run=<folder> format=json                    # for programs

run           a run's folder, below the current folder or the repository
split         test (default) | val | train
checkpoint    best (default; the lowest validation loss) | last | average (of the last, with trainer.average_decay)
device        auto (default) | cpu | cuda | cuda:<n>
dataset.root  the folder of the raw data, where that is no longer the one recorded
format        text (default) | json

loss is the mean squared error of standardised targets, mae the mean absolute error in the data's unit. Data with
another manifest than the run's is rejected. Exit codes: 0 done, 2 rejected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import open_run, run_tool, shown  # noqa: E402
from gramgn.errors import checked_choice  # noqa: E402

DEFAULTS = {
    "run": None,
    "split": "test",
    "checkpoint": "best",
    "device": "auto",
    "dataset.root": "",
    "format": "text",
}


def main(words: list[str]) -> int:
    """Return the exit code: 0 evaluated, 2 rejected."""
    return run_tool(evaluate, words, DEFAULTS, root=ROOT, usage=str(__doc__))


def evaluate(words: dict[str, list[str]]) -> int:
    """Evaluate and print."""
    given = {key: values[0] for key, values in words.items()}
    checked_choice("split", given["split"], ("test", "val", "train"))
    written = checked_choice("format", given["format"], ("text", "json"))
    folder, root = open_run(given["run"]), given["dataset.root"]
    from gramgn.app import evaluate_run, load_trained  # loads torch

    trained = load_trained(folder, checkpoint=given["checkpoint"], device=given["device"])
    moved = str(Path(root).expanduser().absolute()) if root else None
    found = evaluate_run(trained, given["split"], root=moved)
    if written == "json":
        print(json.dumps({"run": shown(folder.path), **found}, indent=2))
        return 0
    print(f"run         {shown(folder.path)}")
    print(f"checkpoint  {found['checkpoint']}")
    print(f"data        {found['data']} [{found['kind']}], {found['split']}")
    print(f"n           {found['n']}")
    print(f"loss        {found['loss']:.6g} (standardised targets)")
    print(f"mae         {found['mae']:.6g} {found['unit']}")
    if found["recorded"] is not None:
        loss, mae = found["recorded"]
        print(f"recorded    loss {loss:.6g}, mae {mae:.6g} {found['unit']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
