"""Which runs stand in one figure, and which of them are seeds of one curve."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ._load import Run


@dataclass(frozen=True)
class Point:
    """One epoch of a curve: the median over seeds and the band from the least to the greatest.

    Attributes:
        epoch: Number of epochs trained.
        train_s: Seconds of training, median over seeds.
        median: The value, median over seeds.
        low: Least value of a seed.
        high: Greatest value of a seed.
    """

    epoch: int
    train_s: float
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """The runs that differ in nothing but the seed.

    Attributes:
        label: Optimizer and network, and what else tells it from other curves of the figure.
        optimizer: The optimizer's choice.
        model: The network's choice.
        runs: One for each seed.
    """

    label: str
    optimizer: str
    model: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that reached their last epoch."""
        return tuple(run for run in self.runs if not run.diverged)

    @property
    def diverged(self) -> tuple[Run, ...]:
        """The runs that ended by a non-finite loss or step."""
        return tuple(run for run in self.runs if run.diverged)

    @property
    def legend(self) -> str:
        """The label with the number of seeds and what became of them."""
        notes = [f"{len(self.runs)} seeds"] if len(self.runs) > 1 else []
        if self.diverged and len(self.runs) == 1:
            notes.append(f"diverged in epoch {_last_epoch(self.runs[0])}")
        elif self.diverged:
            notes.append(f"{len(self.diverged)} diverged")
        return self.label + (f" ({', '.join(notes)})" if notes else "")

    def points(self, column: str) -> list[Point]:
        """Return the epochs that every finished seed has a value for."""
        return seed_points(self.finished, column)


@dataclass(frozen=True)
class Comparison:
    """The runs on one data set at one size on one device: what may stand in one figure.

    Attributes:
        stem: Start of the file names.
        title: Data set, whether it is synthetic, image size, number of images, scale.
        device: Name of the device the times were measured on.
        unit: Unit of the targets, e.g. ``"months"``.
        standardised: Whether a loss of 1 means predicting the mean.
        curves: Sorted by label.
    """

    stem: str
    title: str
    device: str
    unit: str
    standardised: bool
    curves: tuple[Curve, ...]


def seed_points(runs: tuple[Run, ...], column: str) -> list[Point]:
    """Join seeds epoch by epoch.

    Args:
        runs: Runs that differ in the seed only.
        column: A column of ``metrics.csv``; values that are missing or not finite are left out.
    """
    by_epoch: list[dict[int, tuple[float, float]]] = [
        {
            int(row["epoch"] or 0): (float(row["train_s"] or 0.0), float(value))
            for row in run.rows
            if (value := row[column]) is not None and math.isfinite(value)
        }
        for run in runs
    ]
    common = sorted(set.intersection(*(set(found) for found in by_epoch))) if by_epoch else []
    points = []
    for epoch in common:
        times, values = zip(*(found[epoch] for found in by_epoch), strict=True)
        low, high = min(values), max(values)
        points.append(Point(epoch, statistics.median(times), statistics.median(values), low, high))
    return points


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Sort runs into figures and curves.

    Args:
        runs: Runs that can be shown.

    Returns:
        One comparison for each data set, image size, number of images, scale and device, sorted by name.
    """
    groups = _by(runs, _figure_key)
    names = {key: _stem(group[0]) for key, group in groups.items()}
    comparisons = []
    for key, group in groups.items():
        stem = names[key]
        if list(names.values()).count(stem) > 1:
            # Same name, other images or another device.
            stem += "-" + hashlib.sha256(key.encode()).hexdigest()[:6]
        comparisons.append(_comparison(stem, group))
    return sorted(comparisons, key=lambda comparison: comparison.stem)


def _comparison(stem: str, runs: list[Run]) -> Comparison:
    curves: list[Curve] = []
    for same_label in _by(runs, lambda run: run.label).values():
        curves += _curves(same_label)
    first = runs[0]
    trainer = first.part("config").get("trainer") or {}
    return Comparison(
        stem=stem,
        title=_title(first),
        device=str(first.part("device").get("name") or "unknown device"),
        unit=str(first.part("dataset").get("unit") or "units of the target"),
        standardised=bool(trainer.get("standardize_targets", True)),
        curves=tuple(sorted(curves, key=lambda curve: curve.label)),
    )


def _curves(runs: list[Run]) -> list[Curve]:
    """Return one curve for each setting; where there are several, their labels say in what they differ."""
    by_setting = list(_by(runs, lambda run: json.dumps(run.settings, sort_keys=True, default=str)).values())
    settings = [group[0].settings for group in by_setting]
    names = sorted({name for found in settings for name in found})
    differing = [name for name in names if len({repr(found.get(name)) for found in settings}) > 1]
    curves = []
    for group, found in zip(by_setting, settings, strict=True):
        parts = [group[0].label, *(f"{_short(name)} {_text(found.get(name))}" for name in differing)]
        label = ", ".join(parts)
        curves.append(Curve(label, group[0].optimizer, group[0].model, tuple(group)))
    return curves


def _figure_key(run: Run) -> str:
    dataset, trainer = run.part("dataset"), run.part("config").get("trainer") or {}
    parts = [dataset.get(key) for key in ("name", "kind", "image_size", "manifest_sha256")]
    used = (dataset.get("summary") or {}).get("used")
    parts += [used, trainer.get("scale"), trainer.get("standardize_targets"), run.part("device").get("name")]
    return json.dumps(parts)


def _stem(run: Run) -> str:
    dataset, trainer = run.part("dataset"), run.part("config").get("trainer") or {}
    parts = [dataset.get("name"), dataset.get("image_size"), trainer.get("scale")]
    text = "-".join(str(part) for part in parts if part)
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text) or "runs"


def _title(run: Run) -> str:
    dataset, trainer = run.part("dataset"), run.part("config").get("trainer") or {}
    parts = [str(dataset.get("name") or "unnamed data")]
    if dataset.get("kind") == "synthetic":
        parts.append("SYNTHETIC images")
    if size := dataset.get("image_size"):
        parts.append(f"{size}×{size} pixels")
    if used := (dataset.get("summary") or {}).get("used"):
        parts.append(f"{used:,} images")
    if scale := trainer.get("scale"):
        parts.append(f"{scale} scale")
    return ", ".join(parts)


def _by(runs: Iterable[Run], key: Any) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _last_epoch(run: Run) -> int:
    return int(run.rows[-1]["epoch"] or 0) if run.rows else 1


def _short(name: str) -> str:
    return name.removeprefix("optimizer.").removeprefix("model.").removeprefix("trainer.")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
