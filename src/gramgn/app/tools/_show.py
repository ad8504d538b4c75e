"""A run as text: what was run, how it ended, where it comes from, its epochs and a small curve.

From run.json and metrics.csv alone, whatever state they are in; loads no torch.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gramgn.app._repository import shown
from gramgn.app.tools._chart import chart
from gramgn.errors import counted
from gramgn.progress import say
from gramgn.records import Row, RunFolder, path_override

WIDEST = 80
NARROWEST = 40
LABEL = 11
MOST_ROWS = 20
TABLE = (
    ("epoch", 5),
    ("train_loss", 10),
    ("val_loss", 9),
    ("test_loss", 9),
    ("val_mae", 8),
    ("test_mae", 8),
    ("train_s", 8),
    ("step", 7),
)


def show_run(folder: RunFolder, *, width: int = WIDEST) -> str:
    """Return a run as text, no line longer than ``width`` (40 to 80 characters).

    Args:
        folder: A run in any state.
        width: Of the terminal.

    Raises:
        InputError: If run.json is damaged, or metrics.csv before its last line.
    """
    width = min(max(width, NARROWEST), WIDEST)
    run = folder.read_run()
    rows = folder.read_metrics(report=say)
    entries = [*_what(folder, run), *_how_it_ended(folder, run, rows), *_where_from(run)]
    lines = [line for label, value in entries if value for line in _wrapped(label, value, width)]
    if rows:
        lines += ["", *_table(run, rows, width), "", *_curve(rows, width)]
    else:
        lines += ["", "no epoch was done"]
    return "\n".join(lines) + "\n"


def _what(folder: RunFolder, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    data, model, config = _section(run, "dataset"), _section(run, "model"), _section(run, "config")
    optimizer, trainer = _section(run, "optimizer"), _section(config, "trainer")
    kind = str(data.get("kind") or "kind not recorded")
    kind = kind.upper() if kind == "synthetic" else kind
    size, parameters = data.get("image_size"), model.get("num_parameters")
    details = [kind, f"{size}x{size}" if size else "", str(data.get("unit") or "")]
    counts = _section(_section(data, "summary"), "counts")
    splits = ", ".join(f"{counts[split]} {split}" for split in ("train", "val", "test") if split in counts)
    settings = {key: value for key, value in _section(config, "optimizer").items() if _is_plain(key, value)}
    choices = _section(run, "choices")
    overrides = run.get("overrides")
    command = ["python", "train.py", *(map(str, overrides) if isinstance(overrides, list) else [])]
    return [
        ("run", shown(folder.path)),
        ("name", str(run.get("name") or "")),
        ("sweep", str(run.get("group") or "")),
        ("experiment", str(choices.get("experiment") or "")),
        ("command", " ".join(map(shlex.quote, command))),
        (
            "data",
            f"{data.get('name')} [{', '.join(filter(None, details))}]" + (f": {splits}" if splits else ""),
        ),
        (
            "model",
            f"{model.get('name')}" + (f", {parameters:,} parameters" if isinstance(parameters, int) else ""),
        ),
        ("optimizer", f"{optimizer.get('name')}: {_pairs(settings)}"),
        ("alpha", _pairs({key: optimizer[key] for key in ("alpha_sum", "alpha_mean") if key in optimizer})),
        ("trainer", _pairs({key: value for key, value in trainer.items() if _is_plain(key, value)})),
        ("seed", str(run.get("seed", ""))),
        ("init_from", str(run.get("init_from") or "")),
    ]


def _how_it_ended(folder: RunFolder, run: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    error, best, seconds = _section(run, "error"), _section(run, "best"), _section(run, "time")
    epochs = _section(_section(run, "config"), "trainer").get("epochs", "?")
    done = int(rows[-1]["epoch"] or 0) if rows else 0
    state = f"{run['state']}, {done} of {epochs} epochs"
    again = f"python train.py {path_override('resume', shown(folder.path))}"
    if run["state"] == "running":
        state += f"; if no process is at it any more, it was killed: {again}"
    elif run["state"] == "interrupted":
        state += f"; goes on with: {again}"
    unit = _section(run, "dataset").get("unit", "")
    told = [f"{key} {_number(best.get(key))}" for key in ("val_loss", "test_loss")]
    told += [f"{key} {_number(best.get(key))} {unit}" for key in ("val_mae", "test_mae")]
    spent = [f"{key.removesuffix('_s')} {_number(value)} s" for key, value in seconds.items()]
    return [
        ("state", state),
        ("error", f"{error.get('type')}: {error.get('message')}" if error else ""),
        ("best", f"epoch {best.get('epoch')}: {', '.join(told)}" if best else ""),
        ("time", ", ".join(spent)),
    ]


def _threads(number: object) -> str:
    return counted(number, "thread") if isinstance(number, int) else "threads not recorded"


def _where_from(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    git, device, precision = _section(run, "git"), _section(run, "device"), _section(run, "precision")
    starts = run.get("starts") if isinstance(run.get("starts"), list) else []
    times = [str(start.get("time_utc")) for start in starts or [] if isinstance(start, dict)]
    resumed = f", resumed {len(times) - 1} times, last {times[-1]}" if len(times) > 1 else ""
    commit = str(git.get("commit") or "not recorded")
    changed = " with uncommitted changes" if git.get("dirty") else ""
    manifest = _section(run, "dataset").get("manifest_sha256")
    return [
        ("started", f"{times[0]}{resumed}" if times else ""),
        ("code", f"git {commit[:12]}{changed}"),
        ("manifest", str(manifest or "")[:12]),
        ("device", f"{device.get('kind')} ({device.get('name')}), {_threads(run.get('threads'))}"),
        ("precision", _pairs(precision)),
        ("versions", _pairs(_section(run, "versions"))),
        ("id", str(run.get("id") or "")),
    ]


def _table(run: Mapping[str, Any], rows: Sequence[Row], width: int) -> list[str]:
    """Return the epochs as a table: all of them, or the first, the last, the best and some between."""
    best = _section(run, "best").get("epoch")
    step = max(1, -(-len(rows) // MOST_ROWS))
    kept = [
        row
        for place, row in enumerate(rows, 1)
        if place in (1, len(rows)) or place % step == 0 or row["epoch"] == best
    ]
    columns = [(name, size) for name, size in TABLE if any(row[name] is not None for row in rows)]
    while sum(size + 1 for _, size in columns) + 1 > width:
        columns.pop()
    lines = [" ".join(f"{name:>{size}}" for name, size in columns)]
    for row in kept:
        mark = " <" if row["epoch"] == best else ""
        lines.append(" ".join(f"{_number(row[name]):>{size}}" for name, size in columns) + mark)
    unit = _section(run, "dataset").get("unit") or "the data's unit"
    some = f"{len(kept)} of {len(rows)} epochs; " if len(kept) < len(rows) else ""
    note = f"{some}losses: mean squared error of standardised targets; mae in {unit}; < best val_loss"
    return [*lines, *textwrap.wrap(note, width)]


def _curve(rows: Sequence[Row], width: int) -> list[str]:
    series = {
        name: [(float(row["epoch"] or 0), float(row[name] or 0)) for row in rows if row[name] is not None]
        for name in ("train_loss", "val_loss")
    }
    lines = chart(series, width=width)
    return [*lines, f"{'epoch':>{width}}"] if lines else ["no finite loss to draw"]


def _wrapped(label: str, value: str, width: int) -> list[str]:
    value = " ".join(value.split())
    lines = textwrap.wrap(value, width - LABEL, break_on_hyphens=False)
    return [f"{label if number == 0 else '':<{LABEL}}{line}" for number, line in enumerate(lines)]


def _section(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an entry that is a mapping; an empty one where it is absent or something else."""
    value = run.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_plain(key: str, value: object) -> bool:
    return not key.startswith("_") and value is not None and value is not False


def _pairs(entries: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {_number(value) if isinstance(value, float) else value}" for key, value in entries.items()
    )


def _number(value: Any) -> str:
    """Return a number in few digits, and anything else as it is."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
