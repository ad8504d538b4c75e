"""Export the network of a run: its weights alone, and a model card that says what they are and how to load them.

python scripts/export.py run=outputs/runs/<run folder> out=exported
python scripts/export.py run=<folder> out=<new folder> checkpoint=last

run         a run's folder, below the current folder or the repository
out         a new folder below the current one; nothing is ever overwritten
checkpoint  best (default; the lowest validation loss) | last

Writes weights.pt, a plain state_dict that torch.load(..., weights_only=True) reads, and MODEL_CARD.md. Exit
codes: 0 exported, 2 refused and nothing written.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import report_errors, set_repository, tools  # noqa: E402

EXAMPLE = 'python scripts/export.py "run=outputs/runs/<run folder>" out=<new folder>'
DEFAULTS = {"run": None, "out": None, "checkpoint": "best"}


def main(arguments: list[str]) -> int:
    """Export and return the exit code: 0 exported, 2 refused."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    set_repository(ROOT)
    code = [0]
    with report_errors(code):
        words = {
            key: value[0] for key, value in tools.read_words(arguments, DEFAULTS, example=EXAMPLE).items()
        }
        checkpoint = tools.choice("checkpoint", words["checkpoint"], ("best", "last"))
        folder = tools.open_run(words["run"])
        trained = tools.load_trained(folder, checkpoint=checkpoint, device="cpu")
        for path in tools.export_run(trained, Path(words["out"]).expanduser()):
            print(path)
    return code[0]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
