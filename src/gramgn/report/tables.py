"""Tables of docs/results.md in Markdown, by the rules of docs/protocol.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import pandas as pd

from gramgn.figures import CLOSE_TO_ZERO, ratio_at_common_end, run_label, speed
from gramgn.records import Verdict, baselines, time_to_target, verdicts


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float, infinite: str = "diverged") -> str:
    """Return three digits; `infinite` for infinity, `"-"` for a missing value."""
    if math.isnan(value):
        return "-"
    return infinite if math.isinf(value) else f"{value:.3g}"


def spread(values: Iterable[float], infinite: str = "diverged") -> str:
    """Return median, minimum and maximum, e.g. `"0.43 (0.41 to 0.44)"`, or `"-"` if a value is missing."""
    found = pd.Series(list(values), dtype="float64")
    if found.isna().any() or not len(found):
        return "-"
    median, low, high = (
        number(float(value), infinite) for value in (found.median(), found.min(), found.max())
    )
    return median if low == high else f"{median} ({low} to {high})"


def budget_table(ends: pd.DataFrame, ours: Collection[str]) -> str:
    """Return every method at every budget: medians over seeds with minimum and maximum.

    Args:
        ends: What `at_end` returned.
        ours: The methods that are no baselines.
    """
    unit = ends["unit"].iloc[0]
    columns = ("train_loss", "val_loss", "test_loss", "test_mae")
    rows = [
        [
            *(run_label(own), str(epochs), str(len(own))),
            *(spread(own[column]) for column in columns),
            spread(own["train_s"]),
        ]
        for epochs, length in ends.groupby("epochs")
        for method in ordered(ends, ours)
        if len(own := length[length["method"] == method])
    ]
    losses = ("training loss", "validation loss", "test loss", f"test error, {unit}")
    return markdown(("method", "epochs", "seeds", *losses, "seconds"), rows)


def target_table(ends: pd.DataFrame, ours: Collection[str]) -> str:
    """Return the shortest budgets that reach the strongest baseline's losses; see `time_to_target`."""
    lengths = ends.groupby("method")["epochs"].nunique()
    found = [time_to_target(ends, ours=ours, column=column) for column in ("val_loss", "train_loss")]
    header = ["method"]
    for name, times in zip(("validation", "training"), found, strict=True):
        header += [f"epochs to a {name} loss of {number(times.attrs['target'])}", "seconds"]
    rows = []
    for method in ordered(ends, ours):
        row = [run_label(ends[ends["method"] == method])]
        for times in found:
            epochs, seconds, epochs_ratio, seconds_ratio = map(float, times.loc[method])
            is_reached = not math.isnan(epochs)
            untried = ", not run shorter" if lengths[method] == 1 else ""
            row.append(f"{number(epochs)} ({number(epochs_ratio)}){untried}" if is_reached else "not reached")
            row.append("-" if math.isnan(seconds) else f"{number(seconds)} ({number(seconds_ratio)})")
        rows.append(row)
    return markdown(header, rows)


def verdict_table(ends: pd.DataFrame, ours: Collection[str]) -> str:
    """Return the paired differences of our methods to the strongest baseline and what they amount to."""
    rows = []
    for method in _present(ends, ours):
        name = run_label(ends[ends["method"] == method])
        for verdict in verdicts(ends, method, ours=ours):
            if verdict.differences is None:
                rows.append([name, verdict.question, "-", "-", "-", verdict.answer])
                continue
            what = (
                f"test error, {ends['unit'].iloc[0]}"
                if verdict.question == "at the end"
                else "validation loss"
            )
            budgets = f"{verdict.epochs} and {verdict.baseline_epochs}"
            difference = f"{what}: {spread(verdict.differences.values())}"
            rows.append([name, verdict.question, budgets, difference, number(verdict.ratio), _bold(verdict)])
    header = (
        "method",
        "",
        "epochs: its and the baseline's",
        "its value minus the baseline's",
        "ratio of medians",
    )
    return markdown((*header, "verdict"), rows)


def summary_table(places: Mapping[tuple[str, str], pd.DataFrame], ours: Collection[str]) -> str:
    """Return one line per data set, size and method of ours: the verdicts.

    Args:
        places: What `at_end` returned, by the names of data set and size.
        ours: The methods that are no baselines.
    """
    rows = []
    for (dataset, size), ends in places.items():
        strongest, budget = baselines(ends, ours=ours)[0]
        name = f"{run_label(ends[ends['method'] == strongest])}, {budget} epochs"
        for method in _present(ends, ours):
            found = verdicts(ends, method, ours=ours)
            answers = [
                f"{_bold(each)} ({each.epochs} epochs, ratio {number(each.ratio)})"
                if each.differences
                else each.answer
                for each in found
            ]
            rows.append([dataset, size, name, run_label(ends[ends["method"] == method]), *answers])
    questions = ("per epoch", "per second", "test error at the end")
    return markdown(("data set", "size", "strongest baseline", "method", *questions), rows)


def cost_table(pairs: Iterable[tuple[str, str, pd.DataFrame, pd.DataFrame]]) -> str:
    """Return what an epoch of GGN costs next to one of a baseline.

    Args:
        pairs: Names of data set and size; rows of GGN's runs and of the baseline's, each with one setting, the seconds
            of a clock, and the same seeds.
    """
    rows = []
    for dataset, size, *both in pairs:
        ggn, baseline = (
            runs.pivot(index="seed", columns="epoch", values="train_s").reindex(columns=[1, 2])
            for runs in both
        )
        own, other = ggn[2] - ggn[1], baseline[2] - baseline[1]
        labels = [f"{run_label(runs)}, batch {runs['batch_size'].iloc[0]}" for runs in both]
        rows.append([dataset, size, *labels, *map(spread, (own, other, own / other, ggn[1] - own))])
    header = ("an epoch of GGN, s", "of the baseline, s", "ratio", "more for GGN's first epoch, s")
    return markdown(("data set", "size", "GGN", "baseline", *header), rows)


def claims_row(ggn: pd.DataFrame, sgd: Sequence[pd.DataFrame]) -> list[str]:
    """Return what the paper claims of GGN, measured seed by seed against the better of the SGD curves.

    Args:
        ggn: Rows of GGN's runs, with seconds of a clock.
        sgd: The rows of each SGD curve.

    Returns:
        Of five claims the answer, `yes` or `no` if all seeds agree, and the numbers.
    """
    needed = ["seed", "epoch", "state", "train_s", "train_loss", "test_loss"]
    own, *others = (dict(iter(rows[needed].groupby("seed"))) for rows in (ggn, *sgd))
    ended = {seed: (rows["state"] == "done").all() for seed, rows in own.items()}
    least = [float(rows["train_loss"].min()) if ended[seed] else math.inf for seed, rows in own.items()]
    cells = [_answered(least, [value <= CLOSE_TO_ZERO for value in least])]
    for column, axis in (
        ("train_loss", "epoch"),
        ("train_loss", "train_s"),
        ("", ""),
        ("test_loss", "epoch"),
    ):
        score = ratio_at_common_end(column, axis) if column else speed
        values = [score(rows, [runs[seed] for runs in others]) for seed, rows in own.items()]
        is_timed = axis == "epoch" or ggn["train_s"].notna().any()
        cells.append(_answered(values, [value > 1 for value in values]) if is_timed else "not timed")
    return cells


def _answered(values: Sequence[float], holds: Sequence[bool]) -> str:
    """Return whether a claim holds for every seed, and the values."""
    answer = "yes" if all(holds) else "mixed" if any(holds) else "no"
    return f"**{answer}**: {spread(values, 'inf')}"


def ordered(ends: pd.DataFrame, ours: Collection[str]) -> list[str]:
    """Return the methods, the strongest baseline first and ours last."""
    return [*(method for method, _ in baselines(ends, ours=ours)), *_present(ends, ours)]


def _present(ends: pd.DataFrame, ours: Collection[str]) -> list[str]:
    return [method for method in ours if (ends["method"] == method).any()]


def _bold(verdict: Verdict) -> str:
    return f"**{verdict.answer}**"
