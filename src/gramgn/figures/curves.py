"""Curves: which runs are seeds of one curve, which curves share a figure, and medians over seeds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from gramgn.records import SETTING_COLUMNS, RunFolder, settings

OPTIMIZER_NAMES = {
    "ggn": "GGN",
    "ggn_spring": "GGN, SPRING",
    "ggn_recommended": "GGN, recommended",
    "ggn_lm": "GGN, LM damping",
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon",
}
MODEL_NAMES = {"resnet_fixup": "ResNetFixup", "resnet_bn": "ResNetBN", "resnet_gn": "ResNetGN"}
_MOST_CURVES = 12
_GROUP = r"^(optimizer|model|trainer)\."


# Not compared by value: two tables are equal cell by cell or not at all.
@dataclass(frozen=True, eq=False)
class Curve:
    """The runs that differ only in the seed.

    Attributes:
        label: Optimizer and network, and what else distinguishes it from other curves of the figure.
        rows: The rows of its runs, one per run and epoch.
        is_ours: Whether it is an addition to the paper's curves.
        has_own_style: Whether it is drawn in the colour of its optimizer and network.
    """

    label: str
    rows: pd.DataFrame
    is_ours: bool = False
    has_own_style: bool = True

    @cached_property
    def num_seeds(self) -> int:
        """Number of runs."""
        return int(self.rows.run.nunique())

    @property
    def num_finished(self) -> int:
        """Number of runs that reached their last epoch."""
        return self.num_seeds - self.num_diverged

    @property
    def num_diverged(self) -> int:
        """Number of runs that ended with a non-finite loss or step."""
        return len(self.diverged)

    @cached_property
    def diverged(self) -> list[pd.DataFrame]:
        """The rows of each run that ended with a non-finite loss or step."""
        found = self.rows[self.rows.state == "diverged"]
        return [rows for _, rows in found.groupby("run", sort=False)]

    @property
    def legend(self) -> str:
        """The label with the number of seeds and what became of them."""
        notes = [f"{self.num_seeds} seeds"] if self.num_seeds > 1 else []
        if self.num_diverged and self.num_seeds == 1:
            last = self.rows.epoch.max()
            notes.append(f"diverged in epoch {1 if pd.isna(last) else int(last)}")
        elif self.num_diverged:
            notes.append(f"{self.num_diverged} diverged")
        return self.label + (f" ({', '.join(notes)})" if notes else "")

    def points(self, column: str) -> pd.DataFrame:
        """Return the epochs that every finished seed has a value for; see `seed_points`."""
        if column not in self._points:
            self._points[column] = seed_points(self.rows[self.rows.state != "diverged"], column)
        return self._points[column]

    @cached_property
    def _points(self) -> dict[str, pd.DataFrame]:
        return {}


@dataclass(frozen=True, eq=False)
class Comparison:
    """The curves of one figure: runs on the same images, scale and device.

    Attributes:
        stem: Start of the file names.
        title: Data set, whether it is synthetic, image size, number of images, scale.
        curves: Sorted by label.
        num_hidden: Number of curves that were left out, as nobody can tell that many apart.
    """

    stem: str
    title: str
    curves: tuple[Curve, ...]
    num_hidden: int = 0

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The rows of all curves."""
        return pd.concat([curve.rows for curve in self.curves])

    def legible(self) -> Comparison:
        """Return this with at most 12 curves: those that end with the least training loss."""
        if len(self.curves) <= _MOST_CURVES:
            return self
        ranked = sorted(self.curves, key=lambda curve: (_last_loss(curve), curve.label))[:_MOST_CURVES]
        kept = tuple(curve for curve in self.curves if curve in ranked)
        return replace(self, curves=kept, num_hidden=len(self.curves) - len(kept))


def seed_points(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Join seeds epoch by epoch.

    An epoch counts if every seed has a finite value. Between such epochs a missing training loss or error leaves a
    row of NaN, which interrupts a line; the other columns are not evaluated after every epoch, and are joined.

    Returns:
        By epoch: `train_s` (median, in seconds), and `median`, `low` and `high` of the column over the seeds.
    """
    rows = rows[rows.epoch.notna()]
    values = rows.pivot(index="epoch", columns="run", values=column).astype(float)
    values = values.where(np.isfinite(values))
    seconds = rows.pivot(index="epoch", columns="run", values="train_s").ffill().fillna(0.0)
    points = pd.DataFrame(
        {
            "train_s": seconds.median(axis=1),
            "median": values.median(axis=1, skipna=False),
            "low": values.min(axis=1, skipna=False),
            "high": values.max(axis=1, skipna=False),
        }
    )
    whole = points.index[points["median"].notna()]
    if len(whole) and column.startswith("train_"):
        return points.loc[whole[0] : whole[-1]]
    return points.loc[whole]


def heads(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first row of each run."""
    return rows.drop_duplicates("run")


def groups(rows: pd.DataFrame, *columns: str) -> list[pd.DataFrame]:
    """Return the rows in groups of equal values, in the order in which the values first occur."""
    return [group for _, group in rows.groupby(list(columns), sort=False, dropna=False)] if len(rows) else []


def compare(rows: pd.DataFrame) -> list[Comparison]:
    """Sort runs into figures and curves.

    Returns:
        One comparison per data set, image size, number of images, scale and device, sorted by name.
    """
    found = groups(rows, "images", "scale", "standardized", "device")
    stems = [_stem(group) for group in found]
    comparisons = []
    for stem, group in zip(stems, found, strict=True):
        if stems.count(stem) > 1:
            # Same name, other images or another device.
            first = group.iloc[0]
            key = f"{first.manifest} {first.num_images} {first.standardized} {first.device}"
            stem += "-" + hashlib.sha256(key.encode()).hexdigest()[:6]
        curves = (curve for same in groups(group, "optimizer", "model") for curve in curves_of(same))
        ordered = tuple(sorted(curves, key=lambda curve: curve.label))
        comparisons.append(Comparison(stem, _title(group), ordered))
    return sorted(comparisons, key=lambda comparison: comparison.stem)


def curves_of(rows: pd.DataFrame, label: str = "", **look: bool) -> list[Curve]:
    """Return a curve per setting; where there are several, their labels say what differs.

    Labels begin with `label`, by default optimizer and network; `look` are further attributes of the curves.
    """
    found = groups(rows, "setting")
    names = _differing(found) if len(found) > 1 else [[]] * len(found)
    return [
        Curve(", ".join([label or run_label(group), *words]), group, **look)
        for group, words in zip(found, names, strict=True)
    ]


def run_label(rows: pd.DataFrame) -> str:
    """Return what the first run trained with what, e.g. `"GGN on ResNetFixup"`."""
    optimizer, model = str(rows.optimizer.iloc[0]), str(rows.model.iloc[0])
    return f"{OPTIMIZER_NAMES.get(optimizer, optimizer)} on {MODEL_NAMES.get(model, model)}"


def device_name(rows: pd.DataFrame) -> str:
    """Return the device that the first run's times were measured on."""
    return str(rows.device.iloc[0] or "unknown device")


def unit_of(rows: pd.DataFrame) -> str:
    """Return the unit of the first run's targets."""
    return str(rows.unit.iloc[0] or "units of the target")


def is_standardized(rows: pd.DataFrame) -> bool:
    """Return whether a loss of 1 of the first run means predicting the mean."""
    return bool(rows.standardized.iloc[0])


def file_name(text: str) -> str:
    """Return a text with everything but letters, digits and `-_.` replaced."""
    return re.sub(r"[^\w.-]", "_", text)


def _differing(found: Sequence[pd.DataFrame]) -> list[list[str]]:
    """Return for each of several settings the words that distinguish it from the others."""
    columns = sorted(SETTING_COLUMNS, key=SETTING_COLUMNS.__getitem__)
    own = [{name: group[name].iloc[0] for name in columns} for group in found]
    names = [name for name in columns if len({_plain(each[name]) for each in own}) > 1]
    words = [[f"{name} {_plain(each[name])}" for name in names] for each in own]
    if all(group.folder.iloc[0] for group in found):
        recorded = [settings(RunFolder(group.folder.iloc[0]).read_run()) for group in found]
        named = {*SETTING_COLUMNS.values()}  # keys with a column of their own
        others = [{key: value for key, value in each.items() if key not in named} for each in recorded]
        more = sorted({key for each in others for key in each})
        more = [key for key in more if len({repr(each.get(key)) for each in others}) > 1]
        for each, line in zip(others, words, strict=True):
            line += [f"{re.sub(_GROUP, '', key)} {_plain(each.get(key))}" for key in more]
    elif not names:
        words = [[f"other settings {group.other_settings.iloc[0]}"] for group in found]
    return words


def _stem(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    size = "" if pd.isna(first.image_size) else int(first.image_size)
    parts: Iterable[Any] = (first.dataset, size, first.scale)
    return file_name("-".join(str(part) for part in parts if part)) or "runs"


def _title(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    kind = "SYNTHETIC" if first.kind == "synthetic" else str(first.kind)
    what = "vectors" if pd.isna(first.image_size) else "images"
    parts = [str(first.dataset or "unnamed data"), f"{kind} {what}"]
    if what == "images":
        parts.append(f"{first.image_size:.0f}×{first.image_size:.0f} pixels")
    if not pd.isna(first.num_images):
        parts.append(f"{int(first.num_images):,} {what}")
    if first.scale:
        parts.append(f"{first.scale} scale")
    return ", ".join(parts)


def _last_loss(curve: Curve) -> float:
    points = curve.points("train_loss")
    return float(points["median"].iloc[-1]) if len(points) else np.inf


def _plain(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if value is None or pd.isna(value):
        return "none"
    return f"{value:.6g}" if isinstance(value, int | float | np.number) else str(value)
