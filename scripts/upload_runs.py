"""Upload runs to W&B from run.json and metrics.csv: killed ones, ones without W&B's files, whole sweeps.

python scripts/upload_runs.py outputs/runs/<run>
python scripts/upload_runs.py outputs/sweeps/<sweep>                # its runs, and its summary with the heatmap
python scripts/upload_runs.py outputs                               # everything
python scripts/upload_runs.py outputs/runs/<run> --mode offline     # only write W&B's files

Each run is sent whole under its own id and replaces what W&B has under it, so that repeating the command changes
nothing. For a run that ended while `tracking=offline`, `wandb sync <run folder>/wandb/offline-run-*` does as well.
Exit codes: 0 all was sent, 1 something could not be sent (the rest was), 2 bad input, nothing was sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError, first_line  # noqa: E402
from gramgn.records import SWEEP_FILE, RunFolder  # noqa: E402
from gramgn.sweep import draw_heatmap  # noqa: E402
from gramgn.tracking import (  # noqa: E402
    NothingToUploadError,
    TrackingConfig,
    find_uploads,
    unreachable,
    upload_config,
    upload_run,
    upload_summary,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 all was sent, 1 something was not sent, 2 bad input."""
    given = _parser().parse_args(arguments)
    limit_s = given.timeout_s
    try:
        folders = find_uploads(given.folders)
        config = TrackingConfig(mode=given.mode, init_timeout_s=limit_s, finish_timeout_s=limit_s)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if problem := unreachable(config):
        print(f"error: nothing was uploaded: W&B cannot be used ({problem})", file=sys.stderr)
        return 1
    states: list[str] = []
    for folder in folders:
        try:
            state, detail = "uploaded", upload(folder, given)
        except NothingToUploadError as error:
            state, detail = "left out", str(error)
        except InputError as error:
            state, detail = "failed", str(error)
        except Exception as error:  # any error of W&B
            state, detail = "failed", f"W&B: {first_line(error)}"
        states.append(state)
        print(f"{state:<8}  {folder}: {detail}", flush=True)
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if set(states) == {"left out"}:
        print("error: there is nothing to upload", file=sys.stderr)
        return 2
    return 1 if "failed" in states else 0


def upload(folder: Path, given: argparse.Namespace) -> str:
    """Send one run, or the summary of a sweep, and return what was sent."""
    config = upload_config(
        folder, mode=given.mode, project=given.project, entity=given.entity, timeout_s=given.timeout_s
    )
    if (folder / SWEEP_FILE).is_file():
        return upload_summary(folder, config, draw_heatmap)
    return upload_run(RunFolder(folder), config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Upload runs to W&B from run.json and metrics.csv.")
    parser.add_argument(
        "folders", nargs="+", type=Path, help="run folders, sweep folders, or folders of such"
    )
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    parser.add_argument("--project", help="W&B project; default: the one the run was configured with")
    parser.add_argument("--entity", help="W&B team or user; default: the run's, else the account's own")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for W&B at each step")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
