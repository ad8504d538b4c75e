"""Running the studies: one file each, written case by case, so that a stopped call goes on where it was."""

from __future__ import annotations

from pathlib import Path

import torch

from gramgn.app.paths import repository, shown
from gramgn.errors import InputError, counted
from gramgn.figures import Theory, read_theory, write_theory
from gramgn.locks import locked
from gramgn.malloc import keep_freed_blocks
from gramgn.progress import say, track
from gramgn.records import git_state, processor_name

from ._measure import Machine, measure, measure_costs
from ._studies import COST, FULL, Scale, cases, shapes


def run_studies(studies: list[str], out: Path, *, scale: Scale = FULL, force: bool = False) -> list[Path]:
    """Run studies and write ``theory_<study>.csv`` for each; what is there already is kept.

    Args:
        studies: Names out of ``STUDIES``.
        out: Folder for the files; made if missing.
        scale: How much is run.
        force: Whether to run everything again.

    Returns:
        The files.

    Raises:
        InputError: The folder or a file cannot be written, a file there is damaged, or another process writes there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error.strerror or error}") from error
    busy = f"another process works on the theory in {shown(out)}: wait until it has ended, or stop it"
    with locked(out / ".theory.lock", busy):
        machine = _machine()
        files = []
        for study in studies:
            files.append(out / f"theory_{study}.csv")
            if study == COST:
                _run_costs(files[-1], scale, machine, force)
            else:
                _run_cases(study, files[-1], scale, machine, force)
    return files


def _run_cases(study: str, file: Path, scale: Scale, machine: Machine, force: bool) -> None:
    wanted = list(cases(study, scale))
    kept = {} if force else {run.setting.case: run for run in _kept(file).runs}
    _refuse_others(len(kept.keys() - {case.key for case in wanted}), "runs", file)
    found = {case.key: kept[case.key] for case in wanted if case.key in kept}
    left = [case for case in wanted if case.key not in found]
    if found:
        _tell_kept(study, len(found), {run.setting.git for run in found.values()}, machine)
    for case in track(left, total=len(left), label=study, unit="runs"):
        found[case.key] = measure(case, machine)
        write_theory(Theory(tuple(found[each.key] for each in wanted if each.key in found)), file)


def _run_costs(file: Path, scale: Scale, machine: Machine, force: bool) -> None:
    wanted = shapes(scale)
    total = len(wanted) * scale.rounds
    kept = () if force else _kept(file).costs
    asked = {(f"{shape.network}{shape.size}", shape.pixels, shape.batch) for shape in wanted}
    others = [cost for cost in kept if (cost.network, cost.pixels, cost.b) not in asked]
    others += [cost for cost in kept if cost.round > scale.rounds]
    _refuse_others(len(others), "timed steps", file)
    if len(kept) == total:
        _tell_kept(COST, total, {cost.git for cost in kept}, machine)
        return
    keep_freed_blocks()
    # Timed in one go, or the rounds would not see the same machine.
    costs = track(measure_costs(wanted, scale.rounds, machine), total=total, label=COST, unit="steps")
    write_theory(Theory(costs=tuple(costs)), file)


def _refuse_others(count: int, what: str, file: Path) -> None:
    """Fail where a file holds what this call would not run: writing it anew would throw that away."""
    if count:
        raise InputError(
            f"{shown(file)} holds {count} {what} of other settings, as of a run with or without --smoke: choose "
            "another folder with --out, or replace them with --force"
        )


def _kept(file: Path) -> Theory:
    return read_theory([file]) if file.exists() else Theory()


def _tell_kept(study: str, count: int, versions: set[str], machine: Machine) -> None:
    others = versions - {machine.git}
    note = f", made by another version of the code ({', '.join(sorted(others))}; --force runs all again)"
    say(f"{study}: {count} kept{note if others else ''}")


def _machine() -> Machine:
    state = git_state(repository())
    commit = (state["commit"] or "unknown")[:12] + ("+" if state["dirty"] else "")
    return Machine(
        f"{processor_name()}, {counted(torch.get_num_threads(), 'thread')}", torch.__version__, commit
    )
