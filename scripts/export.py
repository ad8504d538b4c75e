"""Export the network of a run: its weights alone, and a model card that says what they are and how to load them.

python scripts/export.py run=outputs/runs/<run folder> out=exported
python scripts/export.py run=<folder> out=<new folder> checkpoint=last

run         a run's folder, below the current folder or the repository
out         a new folder below the current one; nothing is ever overwritten
checkpoint  best (default; the lowest validation loss) | last | average (of the last, with trainer.average_decay)

Writes weights.pt, a plain state_dict that torch.load(..., weights_only=True) reads, and MODEL_CARD.md. Exit
codes: 0 exported, 2 rejected and nothing written.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import open_run, run_tool  # noqa: E402

DEFAULTS = {"run": None, "out": None, "checkpoint": "best"}


def main(words: list[str]) -> int:
    """Return the exit code: 0 exported, 2 rejected."""
    return run_tool(export, words, DEFAULTS, root=ROOT, usage=str(__doc__))


def export(words: dict[str, list[str]]) -> int:
    """Write both files and print their paths."""
    folder = open_run(words["run"][0])
    from gramgn.app import export_run, load_trained  # loads torch

    trained = load_trained(folder, checkpoint=words["checkpoint"][0], device="cpu")
    for path in export_run(trained, Path(words["out"][0]).expanduser()):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
