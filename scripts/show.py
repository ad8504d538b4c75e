"""Show a run in the terminal: what was run, how it ended, where it comes from, its epochs and a small curve.

python scripts/show.py run=outputs/runs/<run folder>
python scripts/show.py run=<folder> | less

run    a run's folder, in any state, below the current folder or the repository

Plain characters, at most 80 columns, from run.json and metrics.csv alone. Exit codes: 0 shown, 2 refused.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import report_errors, set_repository, tools  # noqa: E402

EXAMPLE = 'python scripts/show.py "run=outputs/runs/<run folder>"'


def main(arguments: list[str]) -> int:
    """Show a run and return the exit code: 0 shown, 2 refused."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    set_repository(ROOT)
    code = [0]
    with report_errors(code):
        words = tools.read_words(arguments, {"run": None}, example=EXAMPLE)
        show(tools.show_run(tools.open_run(words["run"][0]), width=shutil.get_terminal_size().columns))
    return code[0]


def show(text: str) -> None:
    """Print a text; names in it that the terminal has no letters for become escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # The reader has seen enough (``| head``); what is left in the buffer must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
