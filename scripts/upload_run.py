"""Upload a run to W&B from its own files (run.json, metrics.csv), also after a crash or an offline run.

python scripts/upload_run.py outputs/runs/<run>
python scripts/upload_run.py outputs/runs/<run> --mode offline     # only write W&B's files
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError  # noqa: E402
from gramgn.tracking import upload_run  # noqa: E402
from gramgn.tracking.records import RunFolder  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 uploaded, 1 W&B did not take it, 2 bad input."""
    parser = argparse.ArgumentParser(description="Upload a run to W&B from its run.json and metrics.csv.")
    parser.add_argument("folder", help="the run folder")
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    parser.add_argument("--project", default="gramgn")
    parser.add_argument("--entity", help="W&B team or user; default: the account's own")
    parser.add_argument("--group", help="name of the sweep")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for W&B at each step")
    given = parser.parse_args(arguments)
    try:
        sent, problem = upload_run(
            RunFolder.open(given.folder),
            mode=given.mode,
            project=given.project,
            entity=given.entity,
            group=given.group,
            timeout_s=given.timeout_s,
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(f"{sent} rows sent ({given.mode})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
