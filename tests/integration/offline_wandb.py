"""Reading an offline W&B file back with W&B's own command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gramgn.tracking.records import METRIC_COLUMNS, Row


def read_back(root: Path) -> list[dict[str, Any]]:
    """Return the records of all ``.wandb`` files under a folder, oldest file first, by W&B's own reader."""
    records = []
    for file in sorted(root.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        records += [json.loads(line) for line in done.stdout.splitlines()]
    return records


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
