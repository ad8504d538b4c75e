"""Reading runs for figures and tables, and telling which of them cannot be shown and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.tracking.records import Row, RunFolder, find_runs

OPTIMIZER_NAMES = {
    "ggn": "GGN",
    "ggn_spring": "GGN, SPRING",
    "ggn_lm": "GGN, LM damping",
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon",
}
MODEL_NAMES = {"resnet_fixup": "ResNetFixup", "resnet_bn": "ResNetBN", "resnet_gn": "ResNetGN"}

# Entries of a configuration that do not make it another experiment.
_NOT_SETTINGS = {
    "seed",
    "name",
    "resume",
    "tracking",
    "recipe",
    "trainer.scale",
    "trainer.device",
    "trainer.threads",
    "trainer.deterministic",
    "dataset.root",
    "dataset.prepared_root",
    "dataset.workers",
}


@dataclass(frozen=True)
class Run:
    """One run that can be shown.

    Attributes:
        path: Its folder, relative to the searched one.
        record: The content of ``run.json``.
        rows: The rows of ``metrics.csv``.
    """

    path: str
    record: Mapping[str, Any]
    rows: list[Row]

    @property
    def optimizer(self) -> str:
        """Name of the optimizer's choice, e.g. ``"ggn"``."""
        return str(self.part("optimizer").get("name", "?"))

    @property
    def model(self) -> str:
        """Name of the network's choice, e.g. ``"resnet_fixup"``."""
        return str(self.part("model").get("name", "?"))

    @property
    def label(self) -> str:
        """What was trained with what, e.g. ``"GGN on ResNetFixup"``."""
        optimizer = OPTIMIZER_NAMES.get(self.optimizer, self.optimizer)
        return f"{optimizer} on {MODEL_NAMES.get(self.model, self.model)}"

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.record.get("seed"))

    @property
    def diverged(self) -> bool:
        """Whether the run ended by a non-finite loss or step."""
        return self.record["state"] == "diverged"

    @property
    def began(self) -> str:
        """UTC time of the first start, as text that sorts."""
        starts = self.record.get("starts") or [{}]
        return str(starts[0].get("time_utc", ""))

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that makes this another experiment than its neighbour, by dotted name; not the seed."""
        found = {key: value for key, value in _flat(self.part("config")).items() if not _is_incidental(key)}
        if self.part("device").get("kind") == "cpu":
            found["threads"] = self.record.get("threads")
        return found

    def part(self, name: str) -> Mapping[str, Any]:
        """Return an entry of ``run.json`` that is itself a mapping; empty where it is missing."""
        value = self.record.get(name)
        return value if isinstance(value, Mapping) else {}


def load_runs(root: Path) -> tuple[list[Run], list[str]]:
    """Read all finished runs under a folder.

    A run is shown if it is done or diverged and its metrics are whole. Of several runs with the same settings
    and seed the newest is shown.

    Args:
        root: Folder to search, to any depth.

    Returns:
        The runs, ordered by path; and for each run left out ``"<path>: <why>"``.
    """
    runs: list[Run] = []
    omitted: list[str] = []
    for folder in find_runs(root):
        name = folder.path.relative_to(Path(root).absolute()).as_posix()
        try:
            runs.append(_load(folder, name))
        except InputError as error:
            omitted.append(f"{name}: {error}")
    newest: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: (run.began, run.path)):
        key = json.dumps([run.label, run.seed, _data_key(run), run.settings], sort_keys=True, default=str)
        if key in newest:
            omitted.append(f"{newest[key].path}: repeated later by {run.path}")
        newest[key] = run
    return sorted(newest.values(), key=lambda run: run.path), sorted(omitted)


def _load(folder: RunFolder, name: str) -> Run:
    record = folder.read_run()
    state = record["state"]
    if state not in ("done", "diverged"):
        raise InputError(_why_unfinished(record))
    if not folder.metrics_csv.is_file():
        raise InputError("its metrics.csv is missing")
    torn: list[str] = []
    rows = folder.read_metrics(report=torn.append)
    if torn:
        raise InputError("its metrics.csv is cut in mid-line")
    run = Run(name, record, rows)
    if run.part("dataset").get("kind") not in ("real", "synthetic"):
        raise InputError("its run.json does not say whether its data is real or synthetic")
    if [row["epoch"] for row in rows] != sorted({row["epoch"] for row in rows}, key=lambda epoch: epoch or 0):
        raise InputError("its metrics.csv has an epoch twice, or out of order")
    if any((row["train_s"] or 0) < 0 for row in rows):
        raise InputError("its metrics.csv has seconds below zero")
    epochs = (run.part("config").get("trainer") or {}).get("epochs")
    last = rows[-1]["epoch"] if rows else 0
    if state == "done" and (not rows or (isinstance(epochs, int) and last != epochs)):
        raise InputError(f"its metrics.csv ends at epoch {last} of {epochs}")
    return run


def _why_unfinished(record: Mapping[str, Any]) -> str:
    error = record.get("error")
    message = error.get("message") if isinstance(error, Mapping) else None
    if record["state"] == "running":
        return "not finished (still running, or killed)"
    return f"{record['state']}" + (f" ({str(message).splitlines()[0]})" if message else "")


def _data_key(run: Run) -> list[Any]:
    dataset = run.part("dataset")
    return [dataset.get("name"), dataset.get("image_size"), dataset.get("manifest_sha256")]


def _is_incidental(key: str) -> bool:
    return key in _NOT_SETTINGS or key.split(".")[0] in _NOT_SETTINGS


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
