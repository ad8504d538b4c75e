"""What the tests of the W&B mirror share: runs to send, and W&B's offline files read back with its own command."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gramgn.records import METRIC_COLUMNS, Row, RunFolder

CONFIG = {"optimizer": {"name": "ggn", "lam": 1.0, "alpha": 0.3}, "seed": 1, "model": {"stages": [16, 32]}}
HOST = "host-of-a-person"
ROWS = [
    {"epoch": 1, "step": 10, "train_s": 0.1 + 0.2, "train_loss": 1 / 3, "val_mae": 12.5, "lr": 1e-300},
    {"epoch": 2, "step": 20, "train_s": 2.75, "train_loss": math.nan, "val_loss": math.inf, "val_mae": 1e300},
    {"epoch": 3, "step": 2**40, "train_s": 3.5, "train_loss": 0.1, "solve_cholesky": 7, "test_mae": 0.0},
]


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account, no settings of the user, and a host name that can be recognised."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)


@pytest.fixture(scope="module", autouse=True)
def stop_the_service() -> Iterator[None]:
    """End W&B's own process after the last test of the file that imports this."""
    yield
    import wandb

    wandb.teardown()


def make_run(path: Path, **entries: Any) -> tuple[RunFolder, dict[str, Any]]:
    folder = RunFolder.create(path)
    dataset = {"name": "rsna_synthetic", "kind": "synthetic", "unit": "months", "manifest_sha256": "ab"}
    identity = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    run = {
        "id": identity,
        "state": "running",
        "name": path.name,
        "config": CONFIG,
        "dataset": dataset,
        "seed": entries.get("config", CONFIG)["seed"],
        **entries,
    }
    folder.write_run(run)
    return folder, run


def read_back(root: Path) -> list[dict[str, Any]]:
    """Return the records of all ``.wandb`` files under a folder, by W&B's own reader, in the order the runs began.

    Not by the files' times: W&B's own process closes a file when it likes.
    """
    found = []
    for file in sorted(root.rglob("*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    return [record for records in sorted(found, key=_began) for record in records]


def _began(records: list[dict[str, Any]]) -> str:
    """Return when a run began, as ISO 8601 in UTC; a file without a run comes first."""
    return min((record["run"]["start_time"] for record in records if record["type"] == "run"), default="")


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def run_ids(records: list[dict[str, Any]]) -> list[str]:
    return [record["run"]["run_id"] for record in records if record["type"] == "run"]


def exit_codes(records: list[dict[str, Any]]) -> list[int]:
    return [record["exit"].get("exit_code", 0) for record in records if record["type"] == "exit"]


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            found |= record["summary"]["update"]
    return found


def as_metrics_row(item: dict[str, Any]) -> Row:
    """Turn one W&B history row back into a row of ``metrics.csv``."""
    row: Row = dict.fromkeys(METRIC_COLUMNS)
    for key, value in item.items():
        family, _, name = key.partition("/")
        if family == "by_epoch":
            row[name.replace("_mae_months", "_mae")] = float(value) if isinstance(value, str) else value
    return row


def stored_config(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration of the one run in the records, without W&B's own entry."""
    (config,) = [record["run"]["config"]["update"] for record in records if "run" in record]
    return {key: value for key, value in config.items() if key != "_wandb"}


def same(left: Row, right: Row) -> bool:
    def equal(a: float | None, b: float | None) -> bool:
        both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        return both_nan or a == b

    return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
