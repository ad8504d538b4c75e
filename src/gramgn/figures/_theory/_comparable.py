"""Which rows of a study may stand in one figure: of the same data and settings, each case once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ._records import STUDIES_OF_RUNS, Cost, Theory, TheoryRun


def comparable(theory: Theory) -> tuple[Theory, list[str]]:
    """Return of each study what most of its rows agree in, and a line for each thing left out.

    Rows of one case, made twice, count once: the last.

    Args:
        theory: Rows of any number of files.
    """
    notes: list[str] = []
    runs: list[TheoryRun] = []
    for study in STUDIES_OF_RUNS:
        runs += _runs(study, theory.study(study), notes)
    costs = _costs(theory.costs, notes)
    versions = [(run.setting.study, run.setting.git) for run in runs] + [("cost", cost.git) for cost in costs]
    for study in (*STUDIES_OF_RUNS, "cost"):
        own = sorted({git for name, git in versions if name == study})
        if len(own) > 1:
            notes.append(f"the theory's {study}: made by {len(own)} versions of the code: {', '.join(own)}")
    return Theory(tuple(runs), tuple(costs)), notes


def _runs(study: str, runs: Sequence[TheoryRun], notes: list[str]) -> list[TheoryRun]:
    kept = _most(runs, lambda run: _common(run), f"the theory's {study}", "runs", _shape, notes)
    once = {run.setting.case: run for run in kept}
    if len(once) < len(kept):
        notes.append(
            f"the theory's {study}: {len(kept) - len(once)} runs were made twice; the last one is shown"
        )
    found: list[TheoryRun] = []
    for own in _grouped(once.values(), _line).values():
        what = f"the theory's {study}, M = {own[0].setting.M}, b = {own[0].setting.b}"
        found += _most(
            own,
            _epochs,
            what,
            "runs",
            lambda run: f"{run.setting.epochs} epochs in {len(run.epochs)} rows",
            notes,
        )
    return found


def _common(run: TheoryRun) -> Hashable:
    """Return what all runs of a study's figures have in common."""
    of = run.setting
    data = (of.dataset, of.kind, of.activation, of.n, of.d)
    own: dict[str, Hashable] = {
        "quadratic": (of.method, of.order, of.b, of.lam, of.alpha),
        "cyclic": (of.method, of.lam, of.alpha),
        "methods": (of.M, of.b, of.order),
    }
    return data, own[of.study]


def _line(run: TheoryRun) -> Hashable:
    """Return what the seeds of one line have in common."""
    of = run.setting
    return of.method, of.order, of.M, of.b, of.lam, of.alpha


def _epochs(run: TheoryRun) -> Hashable:
    return tuple(each.epoch for each in run.epochs)


def _shape(run: TheoryRun) -> str:
    of = run.setting
    settings = f"M = {of.M}, b = {of.b}, λ = {of.lam}, α = {of.alpha}"
    return f"{of.dataset}, {of.kind}, n = {of.n}, d = {of.d}, {of.activation}, {of.method}, {settings}"


def _costs(costs: Sequence[Cost], notes: list[str]) -> list[Cost]:
    kept = _most(
        costs, lambda cost: (cost.device, cost.torch), "the theory's cost", "timed steps", _machine, notes
    )
    once = {(cost.network, cost.pixels, cost.b, cost.m, cost.round): cost for cost in kept}
    if len(once) < len(kept):
        notes.append(
            f"the theory's cost: {len(kept) - len(once)} steps were timed twice; the last one is shown"
        )
    return list(once.values())


def _machine(cost: Cost) -> str:
    return f"{cost.device}, torch {cost.torch}"


def _most(
    rows: Iterable[Any],
    key: Callable[[Any], Hashable],
    what: str,
    unit: str,
    said: Callable[[Any], str],
    notes: list[str],
) -> list[Any]:
    """Return the largest group, of equals the last, and note the others."""
    groups = list(_grouped(rows, key).values())
    if not groups:
        return []
    shown = max(reversed(groups), key=len)
    notes += [
        f"{what}: without {len(group)} {unit} of {said(group[0])}; the {len(shown)} shown are of {said(shown[0])}"
        for group in groups
        if group is not shown
    ]
    return shown


def _grouped(rows: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
