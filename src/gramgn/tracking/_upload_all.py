"""Uploading many runs, and the summaries of their sweeps, one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from gramgn.errors import InputError
from gramgn.records import RunFolder, find_runs

from ._summary import Draw, upload_summary
from ._sweep_table import is_sweep
from ._upload import Upload, UploadOptions, upload_run
from ._wandb import one_line

# After so many failures of W&B in a row it is not there any more: every further run would cost the time limit.
PATIENCE = 3


def find_uploads(paths: Iterable[Path]) -> list[Path]:
    """Return the folders to upload: every run under the given folders, each once, and each sweep after its runs.

    Args:
        paths: Run folders, sweep folders, or folders that hold such at any depth.

    Raises:
        InputError: One of them does not exist or holds no run.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise InputError(f"there is no folder {path}; runs lie in outputs/runs, sweeps in outputs/sweeps")
        top = path.resolve()
        runs = [run.path for run in find_runs(top)]
        if not runs:
            raise InputError(f"{path} holds no run: there is no run.json in it or below it")
        for parent, group in groupby(runs, key=lambda run: run.parent):
            found |= dict.fromkeys(group)
            if runs != [top] and is_sweep(parent):
                found[parent] = None
    return list(found)


def upload_all(folders: Sequence[Path], options: UploadOptions, draw: Draw | None = None) -> Iterator[Upload]:
    """Upload runs and summaries in turn, and go on where one fails; yields what became of each.

    Args:
        folders: Those of :func:`find_uploads`.
        options: How.
        draw: Draws a sweep's heatmap.
    """
    ids: dict[str, Path] = {}
    in_a_row = 0
    for folder in folders:
        if in_a_row >= PATIENCE:
            yield Upload(folder, "failed", f"not tried: W&B failed {PATIENCE} times in a row", reached=False)
            continue
        result = _upload(folder, options, draw, ids)
        in_a_row = in_a_row + 1 if result.state == "failed" and result.reached else 0
        yield result


def _upload(folder: Path, options: UploadOptions, draw: Draw | None, ids: dict[str, Path]) -> Upload:
    try:
        run = RunFolder(folder)
        if not run.run_json.is_file():
            return upload_summary(folder, draw, options)
        record = run.read_run()
        own_id = str((record.get("wandb") or {}).get("id") or record.get("id") or folder)
        if (first := ids.setdefault(own_id, folder)) != folder:
            return Upload(folder, "left out", f"it is a copy of {first}, with the same id", reached=False)
        return upload_run(run, options)
    except InputError as error:
        return Upload(folder, "failed", str(error), reached=False)
    except (
        Exception
    ) as error:  # a bug at one run must not keep the others; it is in the table, the exit code is 1
        return Upload(folder, "failed", f"{type(error).__name__}: {one_line(error)}", reached=False)


def upload_table(results: Sequence[Upload], shown: Callable[[Path], str] = str) -> str:
    """Return what became of each as text: a line each, and the numbers below.

    Args:
        results: Those of :func:`upload_all`.
        shown: How to write a folder.
    """
    width = max(len(result.state) for result in results)
    lines = [f"{result.state:<{width}}  {shown(result.path)}  {result.detail}" for result in results]
    counts = Counter(result.state for result in results)
    lines.append(", ".join(f"{number} {state}" for state, number in counts.items()))
    return "\n".join(lines) + "\n"
