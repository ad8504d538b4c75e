"""The panels of the paper, and which runs fill them.

The rule: a run belongs to a panel by what its record says, never by the name of its folder.

- Figures 1 and 2a show the experiments `fig1/<family>_...` and `ours/<family>_...` on that family's data set or its
  synthetic version, run alone or with `sweep=seeds`; 2b shows `sweep=lambda_alpha_curves`, 2c `sweep=lambda_alpha`.
- Runs that differ only in the seed are one curve. Runs that differ in a setting are separate curves, whose labels say
  what differs; the cells of a grid may differ only in lambda, alpha, seed and number of threads.
- Runs on other images, or with another number of threads, cannot share axes. They are drawn as a further figure set:
  `synthetic-laptop` shows the runs that began first, `synthetic-laptop-2` the next. A note says so.
- Nothing else is chosen or left out: whoever wants fewer curves names the folders to draw.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from gramgn.errors import counted
from gramgn.figures.curves import (
    Comparison,
    Curve,
    curves_of,
    device_name,
    file_name,
    groups,
    heads,
    run_label,
)
from gramgn.figures.grid import Grid, grids, is_square, make_grid
from gramgn.records import ENDED

GRID_SWEEP, CURVES_SWEEP = "lambda_alpha", "lambda_alpha_curves"
PAPERS_POINT = (1.0, 0.1)
"""Lambda and alpha (mean convention) of the paper on RSNA."""
DATASETS = {
    "afad": "AFAD-LITE",
    "afad_synthetic": "AFAD-LITE stand-in",
    "rsna": "RSNA Bone Age",
    "rsna_synthetic": "RSNA Bone Age stand-in",
}
_EXPERIMENTS = ("fig1/{}_ggn_fixup", "fig1/{}_sgd_fixup", "fig1/{}_sgd_bn", "ours/{}_ggn_spring_gn")
_PLACE = ("kind", "scale", "image_size", "standardized", "device")
_NUMBERS = {"afad": "1a, 1b", "rsna": "1c, 1d, 2a", "curves": "2b", "grid": "2c"}


@dataclass(frozen=True)
class Panel:
    """One panel of the paper.

    Attributes:
        key: Start of its file names, e.g. `"fig1a"`.
        number: Its number in the paper, e.g. `"1a"`.
        family: Which runs it shows: `"afad"` or `"rsna"` (figure 1's), `"curves"` or `"grid"`.
        column: The metric.
        against_time: Whether its x axis is time, not the epoch.
        command: How its runs are made.
    """

    key: str
    number: str
    family: str
    column: str
    against_time: bool
    command: str


_FIG1 = "python train.py experiment=fig1/{}_ggn_fixup"
PANELS = (
    Panel("fig1a", "1a", "afad", "train_loss", True, _FIG1.format("afad")),
    Panel("fig1b", "1b", "afad", "train_loss", False, _FIG1.format("afad")),
    Panel("fig1c", "1c", "rsna", "train_loss", True, _FIG1.format("rsna")),
    Panel("fig1d", "1d", "rsna", "train_loss", False, _FIG1.format("rsna")),
    Panel("fig2a-time", "2a", "rsna", "test_loss", True, _FIG1.format("rsna")),
    Panel("fig2a-epoch", "2a", "rsna", "test_loss", False, _FIG1.format("rsna")),
    Panel("fig2b", "2b", "curves", "train_loss", False, f"python train.py sweep={CURVES_SWEEP}"),
    Panel("fig2c", "2c", "grid", "train_loss", False, f"python train.py sweep={GRID_SWEEP}"),
)


@dataclass(eq=False)
class FigureSet:
    """All panels of one kind of data at one scale on one device.

    Attributes:
        name: End of its file names, e.g. `"synthetic-laptop"`.
        kind: `"real"` or `"synthetic"`.
        scale: e.g. `"laptop"`.
        device: Name of the device.
        curves: The curves of the families `"afad"`, `"rsna"` and `"curves"` that there are.
        grid: Figure 2c, if there is a run for it.
        notes: Lines on runs that are drawn elsewhere, and on runs of several versions of the code.
    """

    name: str
    kind: str
    scale: str
    device: str
    curves: dict[str, Comparison] = field(default_factory=dict)
    grid: Grid | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def panels(self) -> list[Panel]:
        """The panels that there are runs for."""
        families = {*self.curves, *(["grid"] if self.grid else [])}
        return [panel for panel in PANELS if panel.family in families]

    @property
    def title(self) -> str:
        """What all its figures have in common."""
        kind = "SYNTHETIC" if self.kind == "synthetic" else self.kind
        return f"{kind} data, {self.scale} scale, {self.device}"


def figure_sets(rows: pd.DataFrame) -> tuple[list[FigureSet], pd.DataFrame]:
    """Sort runs into the panels of the paper, by the rule above.

    Args:
        rows: Runs of `drawable`.

    Returns:
        The figure sets, sorted by name, and the rows of the runs that are in no panel.
    """
    rows = rows.assign(family=_families(rows), threads_shown=rows.threads.where(rows.device_kind == "cpu"))
    in_panels = rows[rows.family != ""]
    sets: list[FigureSet] = []
    places = groups(in_panels[in_panels.state.isin(ENDED)], *_PLACE)
    for ended in sorted(places, key=_start):
        open_cells = in_panels[~in_panels.state.isin(ENDED)]
        sets += _sets(ended, open_cells, {found.name for found in sets})
    return sorted(sets, key=lambda found: found.name), rows[rows.family == ""]


def _families(rows: pd.DataFrame) -> pd.Series:
    """Return the family of panels of each run, empty if it is of none."""
    is_placed = np.isfinite(rows.lam) & np.isfinite(rows.alpha)
    family = pd.Series("", index=rows.index)
    for name in ("afad", "rsna"):
        experiments = [experiment.format(name) for experiment in _EXPERIMENTS]
        is_of = rows.experiment.isin(experiments) & rows.dataset.isin([name, f"{name}_synthetic"])
        family = family.mask(is_of & rows.sweep.isin(["", "seeds"]), name)
    family = family.mask((rows.sweep == CURVES_SWEEP) & is_placed, "curves")
    return family.mask((rows.sweep == GRID_SWEEP) & is_placed, "grid")


def _sets(ended: pd.DataFrame, open_cells: pd.DataFrame, names: set[str]) -> list[FigureSet]:
    """Return the figure sets of one place: as many as there are groups of runs that cannot share a panel.

    `open_cells` are runs of any place that have not ended: they may not know their images yet.
    """
    first = ended.iloc[0]
    name = file_name(f"{first.kind}-{first.scale}")
    if name in names:
        # The same kind and scale on another device or at another size.
        name = file_name(f"{name}-{first.image_size}-{device_name(ended)}")
    parts: dict[str, list[pd.DataFrame]] = {}
    for family, found in ended.groupby("family"):
        if family == "grid":
            parts["grid"] = grids(pd.concat([found, open_cells[open_cells.family == "grid"]]))
        else:
            parts[str(family)] = groups(found, "images", "threads_shown")
        parts[str(family)].sort(key=_start)
    sets = []
    for number in range(max(map(len, parts.values()))):
        free = (f"{name}-{count}" if count > 1 else name for count in itertools.count(number + 1))
        figures = FigureSet(
            next(each for each in free if each not in names), first.kind, first.scale, device_name(ended)
        )
        # The grid first: the labels of 2b name its best alphas.
        for family in ("grid", "afad", "rsna", "curves"):
            if number < len(parts.get(family, [])):
                _add(figures, family, parts[family][number])
                if number:
                    figures.notes.append(_note(family, parts[family][number], parts[family][0], figures.name))
        names = names | {figures.name}
        sets.append(figures)
    return sets


def _add(figures: FigureSet, family: str, rows: pd.DataFrame) -> None:
    if family == "grid":
        figures.grid = make_grid(rows, _title(rows))
    else:
        curves = _lambda_curves(figures, rows) if family == "curves" else _experiment_curves(family, rows)
        figures.curves[family] = Comparison(family, _title(rows), tuple(curves))
    versions = heads(rows[rows.state.isin(ENDED)]).code.value_counts()
    if len(versions) > 1:
        counts = ", ".join(f"{code or 'unknown'} ({count})" for code, count in sorted(versions.items()))
        figures.notes.append(
            f"figure {_NUMBERS[family]}: its runs are of {len(versions)} versions of the code: {counts}"
        )


def _experiment_curves(family: str, rows: pd.DataFrame) -> list[Curve]:
    found = []
    for experiment in _EXPERIMENTS:
        of_name = rows[rows.experiment == experiment.format(family)]
        if len(of_name):
            is_ours = experiment.startswith("ours/")
            label = ("ours: " if is_ours else "") + run_label(of_name)
            found += curves_of(of_name, label, is_ours=is_ours)
    return found


def _lambda_curves(figures: FigureSet, rows: pd.DataFrame) -> list[Curve]:
    best = figures.grid.best_alphas() if figures.grid else {}
    found = []
    for seeds in groups(rows.sort_values(["lam", "alpha"], kind="stable"), "lam", "alpha"):
        lam, alpha = float(seeds.lam.iloc[0]), float(seeds.alpha.iloc[0])
        is_papers = (lam, alpha) == PAPERS_POINT and seeds.damping_convention.iloc[0] == "mean"
        notes = ["the paper's"] if is_papers else []
        if best.get(lam) == alpha:
            notes.append("best of 2c")
        label = f"λ = {lam:g}, α = {alpha:g}" + (f" ({', '.join(notes)})" if notes else "")
        found += curves_of(seeds, label, has_own_style=is_papers)
    return found


def other_grids(rows: pd.DataFrame) -> list[tuple[str, Grid]]:
    """Return the grids over lambda and alpha of runs in no panel, with the starts of their file names."""
    found: list[tuple[str, Grid]] = []
    for group in filter(is_square, grids(rows)):
        first = group.iloc[0]
        name = file_name(f"{first.dataset}-{first.scale}-{first.optimizer}-{first.model}")
        taken = sum(stem == name or stem.startswith(f"{name}-") for stem, _ in found)
        found.append((f"{name}-{taken + 1}" if taken else name, make_grid(group, _title(group))))
    return found


def _note(family: str, rows: pd.DataFrame, first: pd.DataFrame, name: str) -> str:
    """Return where runs are drawn that cannot share a panel with the first ones."""
    run, other = rows.iloc[0], first.iloc[0]
    compared = {"num_images": "images", "threads": "threads", "epochs": "epochs", "batch_size": "batch size"}
    differences = [
        f"{run[column]} {word}, not {other[column]}"
        for column, word in compared.items()
        if pd.notna(run[column]) and pd.notna(other[column]) and run[column] != other[column]
    ]
    reason = "; ".join(differences) or "other images or settings"
    count = counted(rows.run.nunique(), "run")
    return (
        f"figure {_NUMBERS[family]}: {count} such as {run.run} cannot share a panel with {other.run} ({reason}) "
        f"and {'is' if rows.run.nunique() == 1 else 'are'} drawn as {name}; name the folders to draw only some runs"
    )


def _title(rows: pd.DataFrame) -> str:
    """Return two lines: the data set and whether it is synthetic; size, number of images, scale and network."""
    first = rows.iloc[0]
    head = DATASETS.get(first.dataset, first.dataset)
    head += " (SYNTHETIC images)" if first.kind == "synthetic" else ""
    parts = [f"{first.image_size}×{first.image_size} pixels"]
    if pd.notna(first.num_images):
        parts.append(f"{first.num_images:,} images")
    depths = rows.depth.unique()
    network = f", ResNet-{depths[0]}" if len(depths) == 1 and pd.notna(depths[0]) else ""
    return f"{head}\n{', '.join(parts)}, {first.scale} scale{network}"


def _start(rows: pd.DataFrame) -> tuple[str, str]:
    return str(rows.began.min()), str(rows.run.iloc[0])


def short_data(rows: pd.DataFrame) -> str:
    """Return data set, image size and number of images in few words."""
    first = rows.iloc[0]
    images = f", {first.num_images:,} images" if pd.notna(first.num_images) else ""
    return f"{DATASETS.get(first.dataset, first.dataset)}, {first.image_size}×{first.image_size}{images}"
