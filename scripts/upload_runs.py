"""Upload runs to W&B from their own files (run.json, metrics.csv): finished, killed or offline ones, whole sweeps.

python scripts/upload_runs.py outputs/runs/<run>
python scripts/upload_runs.py outputs/sweeps/<sweep>                # its runs, and its summary with the heatmap
python scripts/upload_runs.py outputs                               # everything
python scripts/upload_runs.py outputs/runs/<run> --mode offline     # only write W&B's files

A run is sent under its own id, all its starts as one; what was sent before and has not changed is left alone.
Exit codes: 0 all is there, 1 something could not be sent (the rest was), 2 bad input, nothing was sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError  # noqa: E402
from gramgn.progress import say  # noqa: E402
from gramgn.sweep import draw_heatmap  # noqa: E402
from gramgn.tracking import (  # noqa: E402
    Upload,
    UploadOptions,
    find_uploads,
    unreachable,
    upload_all,
    upload_table,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 all is there, 1 something was not sent, 2 bad input."""
    given = _parser().parse_args(arguments)
    options = UploadOptions(
        given.mode, given.project, given.entity, given.group, given.timeout_s, given.again
    )
    try:
        folders = find_uploads(given.folders)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if problem := unreachable(options):
        print(f"error: nothing was uploaded: W&B cannot be used ({problem})", file=sys.stderr)
        return 1
    results: list[Upload] = []
    for number, result in enumerate(upload_all(folders, options, draw_heatmap), start=1):
        results.append(result)
        if len(folders) > 1:
            say(f"[{number}/{len(folders)}] {result.state}: {shown(result.path)}")
    print(upload_table(results, shown), end="")
    states = {result.state for result in results}
    if states == {"left out"}:
        print("error: there is nothing to upload", file=sys.stderr)
        return 2
    return 1 if "failed" in states else 0


def shown(path: Path) -> str:
    """Return a folder relative to the current one where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Upload runs to W&B from their own files; what has not changed since it was sent is left alone."
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="run folders, sweep folders, or folders of such"
    )
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    parser.add_argument("--project", help="W&B project; default: the one the run was configured with")
    parser.add_argument("--entity", help="W&B team or user; default: the run's, else the account's own")
    parser.add_argument("--group", help="name of the sweep; default: the one that the run belongs to")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for W&B at each step")
    parser.add_argument("--again", action="store_true", help="also send what has not changed")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
