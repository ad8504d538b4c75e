"""Which runs belong to which panel, told by what run.json says of them, never by the name of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ._grid import ALPHA, LAM, Grid, is_placed, make_grid, place
from ._group import Comparison, Curve, comparison_of, device_name, file_name, group_by
from ._load import Loaded
from ._panels import CURVES_SWEEP, DATASETS, GRID_SWEEP, FigureSet
from ._run import Run, as_number

PAPERS_POINT = (1.0, 0.1)  # lambda and alpha (mean convention) of the paper on RSNA
_NUMBERS = {"afad": "1a, 1b", "rsna": "1c, 1d, 2a", "curves": "2b", "grid": "2c"}


@dataclass
class _Draft:
    """What is collected for one figure set."""

    curves: dict[str, Comparison] = field(default_factory=dict)
    grid: Grid | None = None
    notes: list[str] = field(default_factory=list)
    used: list[Run] = field(default_factory=list)


def figure_sets(loaded: Loaded) -> tuple[list[FigureSet], list[Run]]:
    """Sort runs into the panels of the paper.

    A panel joins runs on the same images, at the same scale and image size, on the same device with the same
    number of threads (the grid, which shows no time: any number). Where there is a choice it shows what has
    the most curves, then the most seeds, the most epochs, the newest; notes say what it left out.

    Args:
        loaded: All runs.

    Returns:
        The figure sets, sorted by name, and the runs that are in no panel.
    """
    groups = group_by(loaded.runs, _set_key)
    drafts = {key: _draft(runs, [*loaded.unfinished, *loaded.waiting]) for key, runs in groups.items()}
    used = {id(run) for draft in drafts.values() for run in draft.used}
    ordered = sorted(
        (key for key in drafts if drafts[key].used), key=lambda key: (-len(drafts[key].used), key)
    )
    sets: list[FigureSet] = []
    for key in ordered:
        draft, first = drafts[key], drafts[key].used[0]
        kind, scale = str(first.part("dataset").get("kind")), str(first.scale)
        name = file_name(f"{kind}-{scale}")
        if name in {found.name for found in sets}:
            # The same kind and scale on another device or at another size: the largest set has the plain name.
            name = file_name(f"{name}-{first.part('dataset').get('image_size')}-{device_name(first)}")
        taken = [found.name for found in sets].count(name)
        name += f"-{taken + 1}" if taken else ""
        device = device_name(first)
        sets.append(FigureSet(name, kind, scale, device, draft.curves, draft.grid, tuple(draft.notes)))
    rest = [run for run in loaded.runs if id(run) not in used]
    return sorted(sets, key=lambda found: found.name), rest


def _draft(runs: Sequence[Run], unfinished: Sequence[Run]) -> _Draft:
    draft = _Draft()
    for family in ("afad", "rsna"):
        _add_figure_1(draft, family, runs)
    _add_grid(draft, runs, unfinished)
    _add_curves(draft, runs)
    for family, numbers in _NUMBERS.items():
        found = draft.grid.runs if family == "grid" and draft.grid else ()
        if family in draft.curves:
            found = tuple(run for curve in draft.curves[family].curves for run in curve.runs)
        codes = group_by(found, lambda run: run.code)
        if len(codes) > 1:
            told = ", ".join(f"{code} ({len(each)})" for code, each in sorted(codes.items()))
            draft.notes.append(f"figure {numbers}: its runs are of {len(codes)} versions of the code: {told}")
    return draft


def _add_figure_1(draft: _Draft, family: str, runs: Sequence[Run]) -> None:
    names = [f"fig1/{family}_{curve}" for curve in ("ggn_fixup", "sgd_fixup", "sgd_bn")]
    names.append(f"ours/{family}_ggn_spring_gn")
    datasets = (family, f"{family}_synthetic")
    candidates = [
        run
        for run in runs
        if run.experiment in names
        and run.sweep in (None, "seeds")
        and run.part("dataset").get("name") in datasets
    ]
    if not candidates:
        return
    joined = _most(
        draft, family, "on other images, or with other threads", candidates, _place_key, _experiments
    )
    curves = []
    for name in names:
        of_name = [run for run in joined if run.experiment == name]
        if not of_name:
            continue
        chosen = _most(draft, family, "with other settings", of_name, Run.setting_key, lambda _: 0)
        first, is_ours = chosen[0], name.startswith("ours/")
        label = f"ours: {first.label}" if is_ours else first.label
        curves.append(Curve(label, first.optimizer, first.model, tuple(_by_seed(chosen)), is_ours=is_ours))
    _finish(draft, family, curves)


def _add_curves(draft: _Draft, runs: Sequence[Run]) -> None:
    candidates = [run for run in runs if run.sweep == CURVES_SWEEP and is_placed(run)]
    if not candidates:
        return

    def key(run: Run) -> str:
        return _place_key(run) + run.setting_key(LAM, ALPHA)

    joined = _most(draft, "curves", "on other images, or with other settings", candidates, key, _pairs)
    curves = []
    for (lam, alpha), seeds in _by_place(joined).items():
        label = f"λ = {lam:g}, α = {alpha:g}"
        is_papers = (lam, alpha) == PAPERS_POINT and joined[0].own_settings[
            "optimizer.damping_convention"
        ] == "mean"
        notes = ["the paper's"] if is_papers else []
        if draft.grid is not None and draft.grid.best_alpha(lam) == alpha:
            notes.append("best of 2c")
        label += f" ({', '.join(notes)})" if notes else ""
        first = seeds[0]
        curves.append(Curve(label, first.optimizer, first.model, tuple(seeds), has_own_style=is_papers))
    _finish(draft, "curves", curves)


def _add_grid(draft: _Draft, runs: Sequence[Run], unfinished: Sequence[Run]) -> None:
    candidates = [run for run in runs if run.sweep == GRID_SWEEP and is_placed(run)]
    if not candidates:
        return

    def key(run: Run) -> str:
        return run.data_key + run.setting_key(LAM, ALPHA, "threads")

    joined = _most(draft, "grid", "on other images, or with other settings", candidates, key, _pairs)
    first = joined[0]
    same = [run for run in unfinished if run.sweep == GRID_SWEEP and is_placed(run) and _is_of(run, first)]
    draft.grid = _grid_of(joined, same)
    draft.used += joined


def _grid_of(runs: Sequence[Run], unfinished: Sequence[Run]) -> Grid:
    common = comparison_of("grid", _title(runs), runs, ())
    return make_grid(
        runs,
        unfinished,
        title=common.title,
        device=common.device,
        unit=common.unit,
        standardised=common.standardised,
    )


def other_grids(runs: Iterable[Run], unfinished: Sequence[Run]) -> list[tuple[str, Grid]]:
    """Return the grids of runs in no panel that differ in lambda and alpha only, with the starts of their file names.

    Args:
        runs: Runs that are in no panel.
        unfinished: All runs that did not finish, or have not begun.
    """

    def key(run: Run) -> str:
        # Not by sweep: a cell that was repeated in another one is still a cell of this grid.
        names = json.dumps([run.part("dataset").get("name"), run.scale, device_name(run)])
        return names + run.data_key + run.setting_key(LAM, ALPHA, "threads")

    found: list[tuple[str, Grid]] = []
    for joined in group_by((run for run in runs if is_placed(run)), key).values():
        pairs = {place(run) for run in joined}
        if min(len({lam for lam, _ in pairs}), len({alpha for _, alpha in pairs})) < 2:
            continue
        first = joined[0]
        same = [run for run in unfinished if is_placed(run) and _is_of(run, first)]
        name = file_name(f"{first.part('dataset').get('name')}-{first.scale}-{first.optimizer}-{first.model}")
        taken = sum(stem == name or stem.startswith(f"{name}-") for stem, _ in found)
        found.append((f"{name}-{taken + 1}" if taken else name, _grid_of(joined, same)))
    return found


def _is_of(run: Run, first: Run) -> bool:
    """Return whether an unfinished run, which may not know its images yet, is of the same grid."""
    names = run.part("dataset").get("name"), first.part("dataset").get("name")
    keys = [each.setting_key(LAM, ALPHA, "threads") for each in (run, first)]
    return names[0] == names[1] and run.scale == first.scale and keys[0] == keys[1]


def _finish(draft: _Draft, family: str, curves: list[Curve]) -> None:
    runs = [run for curve in curves for run in curve.runs]
    draft.curves[family] = comparison_of(family, _title(runs), runs, curves)
    draft.used += runs


def _most(
    draft: _Draft,
    family: str,
    why: str,
    runs: Iterable[Run],
    key: Callable[[Run], str],
    num_curves: Callable[[list[Run]], int],
) -> list[Run]:
    """Return the group with the most curves, then seeds, epochs, then the newest; note what the others are."""

    def rank(group: list[Run]) -> tuple[int, int, float, str]:
        epochs = max(float(run.own_settings["trainer.epochs"] or 0.0) for run in group)
        return num_curves(group), len(group), epochs, max(run.began for run in group)

    groups = sorted(group_by(runs, key).values(), key=rank)
    for group in groups[:-1]:
        what = group[0].experiment if family in ("afad", "rsna") else f"sweep={group[0].sweep}"
        count = f"{len(group)} run{'s' if len(group) > 1 else ''}"
        shown = f"than the {len(groups[-1])} shown"
        draft.notes.append(
            f"figure {_NUMBERS[family]}: without {count} of {what} {why} {shown}, e.g. {group[0].path}"
            + _difference(group[0], groups[-1][0])
        )
    return groups[-1]


def _difference(left_out: Run, shown: Run) -> str:
    """Say in which settings two runs differ, at most three of them."""
    names = sorted({*left_out.settings, *shown.settings} - {LAM, ALPHA})
    pairs = [(name, left_out.settings.get(name), shown.settings.get(name)) for name in names]
    found = [
        f"{name} {mine}, not {other}" for name, mine, other in pairs if as_number(mine) != as_number(other)
    ]
    if left_out.num_images != shown.num_images:
        found.insert(0, f"{left_out.num_images} images, not {shown.num_images}")
    return f" ({'; '.join(found[:3])})" if found else ""


def _title(runs: Sequence[Run]) -> str:
    """Return two lines: the data set and whether it is synthetic; size, number of images, scale and network."""
    dataset = runs[0].part("dataset")
    name = str(dataset.get("name"))
    head = DATASETS.get(name, name) + (" (SYNTHETIC images)" if dataset.get("kind") == "synthetic" else "")
    parts = [f"{dataset.get('image_size')}×{dataset.get('image_size')} pixels"]
    if runs[0].num_images:
        parts.append(f"{runs[0].num_images:,} images")
    depths = {run.own_settings["model.depth"] for run in runs}
    depth = depths.pop() if len(depths) == 1 else None
    network = f", ResNet-{depth:g}" if isinstance(depth, float) else ""
    return f"{head}\n{', '.join(parts)}, {runs[0].scale} scale{network}"


def _set_key(run: Run) -> str:
    dataset, trainer = run.part("dataset"), run.part("config").get("trainer") or {}
    size, standardised = dataset.get("image_size"), trainer.get("standardize_targets")
    return json.dumps([dataset.get("kind"), run.scale, size, standardised, device_name(run)], default=str)


def _place_key(run: Run) -> str:
    return run.data_key + json.dumps(run.own_settings["threads"])


def _experiments(runs: list[Run]) -> int:
    return len({run.experiment for run in runs})


def _pairs(runs: list[Run]) -> int:
    return len({place(run) for run in runs})


def _by_place(runs: Iterable[Run]) -> dict[tuple[float, float], list[Run]]:
    found: dict[tuple[float, float], list[Run]] = {}
    for run in sorted(runs, key=place):
        found.setdefault(place(run), []).append(run)
    return {pair: _by_seed(seeds) for pair, seeds in found.items()}


def _by_seed(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (len(run.seed), run.seed))
