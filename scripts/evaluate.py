"""Evaluate the network of a run on a split of the data it was trained on.

python scripts/evaluate.py run=outputs/runs/<run folder> split=test
python scripts/evaluate.py run=outputs/runs/<run folder> split=val checkpoint=last
python scripts/evaluate.py run=<folder> dataset.root=/data/rsna        # the raw data lies elsewhere now
python scripts/evaluate.py run=<folder> format=json                    # for programs

run           a run's folder, below the current folder or the repository
split         test (default) | val | train
checkpoint    best (default; the lowest validation loss) | last
device        auto (default) | cpu | cuda | cuda:<n>
dataset.root  the folder of the raw data, where that is no longer the one recorded
format        text (default) | json

loss is the mean squared error of standardised targets, mae the mean absolute error in the data's unit. Data with
another manifest than the run's is refused. Exit codes: 0 done, 2 refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import report_errors, set_repository, shown, tools  # noqa: E402

if TYPE_CHECKING:
    from gramgn.app.tools import Result

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
    """Evaluate, print, and return the exit code: 0 done, 2 refused."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    set_repository(ROOT)
    code = [0]
    with report_errors(code):
        words = {
            key: value[0] for key, value in tools.read_words(arguments, DEFAULTS, example=EXAMPLE).items()
        }
        split = tools.choice("split", words["split"], ("test", "val", "train"))
        checkpoint = tools.choice("checkpoint", words["checkpoint"], ("best", "last"))
        written = tools.choice("format", words["format"], ("text", "json"))
        folder = tools.open_run(words["run"])
        root = words["dataset.root"]
        trained = tools.load_trained(folder, checkpoint=checkpoint, device=words["device"])
        result = tools.evaluate_run(
            trained, split, root=str(Path(root).expanduser().absolute()) if root else None
        )
        as_json = json.dumps({"run": shown(folder.path), **asdict(result)}, indent=2)
        print(as_json if written == "json" else text(result, shown(folder.path)))
    return code[0]


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
