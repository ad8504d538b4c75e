"""Which runs stand in one figure, and which of them are seeds of one curve."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._run import OTHER_SETTINGS, Run, as_number

_MOST_CURVES = 12


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
        is_ours: Whether it stands beside the paper's curves and is not one of them.
        has_own_style: Whether it is drawn in the colour of its optimizer and network.
    """

    label: str
    optimizer: str
    model: str
    runs: tuple[Run, ...]
    is_ours: bool = False
    has_own_style: bool = True

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
        num_hidden: Curves that were left out, because no eye can follow so many.
    """

    stem: str
    title: str
    device: str
    unit: str
    standardised: bool
    curves: tuple[Curve, ...]
    num_hidden: int = 0

    def legible(self) -> Comparison:
        """Return this with at most 12 curves: those that end with the least training loss."""
        if len(self.curves) <= _MOST_CURVES:
            return self
        ranked = sorted(self.curves, key=_end)[:_MOST_CURVES]
        kept = tuple(curve for curve in self.curves if curve in ranked)
        return replace(self, curves=kept, num_hidden=len(self.curves) - len(kept))


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
    groups = group_by(runs, _figure_key)
    names = {key: _stem(group[0]) for key, group in groups.items()}
    comparisons = []
    for key, group in groups.items():
        stem = names[key]
        if list(names.values()).count(stem) > 1:
            # Same name, other images or another device.
            stem += "-" + hashlib.sha256(key.encode()).hexdigest()[:6]
        comparisons.append(_comparison(stem, group))
    return sorted(comparisons, key=lambda comparison: comparison.stem)


def group_by(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    """Return runs by key, in the order in which the keys come.

    Args:
        runs: Any runs.
        key: What runs of one group have in common.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def comparison_of(stem: str, title: str, runs: Sequence[Run], curves: Iterable[Curve]) -> Comparison:
    """Return curves with what they have in common.

    Args:
        stem: Start of the file names.
        title: What the figure says of its data.
        runs: Runs on the same data and device; the first stands for all.
        curves: Curves of these runs, in the order of the legend.
    """
    first = runs[0]
    trainer = first.part("config").get("trainer") or {}
    return Comparison(
        stem=stem,
        title=title,
        device=device_name(first),
        unit=str(first.part("dataset").get("unit") or "units of the target"),
        standardised=bool(trainer.get("standardize_targets", True)),
        curves=tuple(curves),
    )


def device_name(run: Run) -> str:
    """Return the device that a run's times were measured on."""
    return str(run.part("device").get("name") or "unknown device")


def _comparison(stem: str, runs: list[Run]) -> Comparison:
    curves: list[Curve] = []
    for same_label in group_by(runs, lambda run: run.label).values():
        curves += _curves(same_label)
    return comparison_of(stem, _title(runs[0]), runs, sorted(curves, key=lambda curve: curve.label))


def _curves(runs: list[Run]) -> list[Curve]:
    """Return one curve for each setting; where there are several, their labels say in what they differ."""
    by_setting = list(group_by(runs, lambda run: run.setting_key()).values())
    settings = [group[0].settings for group in by_setting]
    names = sorted({name for found in settings for name in found})
    differing = [name for name in names if len({repr(as_number(found.get(name))) for found in settings}) > 1]
    if len(differing) > 1 and OTHER_SETTINGS in differing:
        differing.remove(OTHER_SETTINGS)
    curves = []
    for group, found in zip(by_setting, settings, strict=True):
        parts = [group[0].label, *(f"{_short(name)} {_text(found.get(name))}" for name in differing)]
        label = ", ".join(parts)
        curves.append(Curve(label, group[0].optimizer, group[0].model, tuple(group)))
    return curves


def _figure_key(run: Run) -> str:
    trainer = run.part("config").get("trainer") or {}
    return json.dumps([run.data_key, run.scale, trainer.get("standardize_targets"), device_name(run)])


def _stem(run: Run) -> str:
    dataset = run.part("dataset")
    parts = [dataset.get("name"), dataset.get("image_size"), run.scale]
    return file_name("-".join(str(part) for part in parts if part)) or "runs"


def file_name(text: str) -> str:
    """Return a text with all but letters, digits and ``-_.`` replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


def _title(run: Run) -> str:
    dataset = run.part("dataset")
    parts = [str(dataset.get("name") or "unnamed data")]
    size = dataset.get("image_size")
    kind = "SYNTHETIC" if dataset.get("kind") == "synthetic" else str(dataset.get("kind"))
    parts.append(f"{kind} {'images' if size else 'vectors'}")
    if size:
        parts.append(f"{size}×{size} pixels")
    if run.num_images:
        parts.append(f"{run.num_images:,} {'images' if size else 'vectors'}")
    if run.scale:
        parts.append(f"{run.scale} scale")
    return ", ".join(parts)


def _end(curve: Curve) -> tuple[bool, float, str]:
    points = curve.points("train_loss")
    return not points, points[-1].median if points else math.inf, curve.label


def _last_epoch(run: Run) -> int:
    return int(run.rows[-1]["epoch"] or 0) if run.rows else 1


def _short(name: str) -> str:
    return name.removeprefix("optimizer.").removeprefix("model.").removeprefix("trainer.")


def _text(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.6g}" if is_number else str(value)
