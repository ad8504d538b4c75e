"""The claims of the paper, each with the number measured here and its spread over seeds."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gramgn.figures.panels import PANELS, FigureSet

CLOSE_TO_ZERO = 0.05
"""Share of the variance of the targets."""
WITHIN_EPOCHS = 30
NEAR_1 = (0.5, 2.0)
HARDLY = 2.0
"""Factor between the largest and the least loss over alpha."""
_COMPARED = ("ggn_fixup", "sgd_bn", "sgd_fixup")

Score = Callable[[pd.DataFrame, Sequence[pd.DataFrame]], float]
"""From the rows of GGN's run and of the two baselines to a number."""


@dataclass(frozen=True)
class Measurement:
    """One number.

    Attributes:
        name: What was measured, in words.
        values: By seed; infinite or zero where a run diverged or a level was never reached.
        unit: What the values are counted in: there is one per seed.
    """

    name: str
    values: Mapping[Any, float]
    unit: str = "seed"

    @property
    def median(self) -> float:
        """Median over seeds."""
        return statistics.median(self.values.values())

    @property
    def text(self) -> str:
        """Median, least and greatest, and the number of seeds, e.g. `"2.1 (1.8 to 2.4, 3 seeds)"`."""
        low, high = min(self.values.values()), max(self.values.values())
        if len(self.values) == 1:
            return f"{self.median:.3g} (1 {self.unit})"
        return f"{self.median:.3g} ({low:.3g} to {high:.3g}, {len(self.values)} {self.unit}s)"


@dataclass(frozen=True)
class Claim:
    """One claim of the paper.

    Attributes:
        key: Short name.
        text: The claim.
        figures: The panels that show it, e.g. `"1a, 1b"`.
        rule: When it counts as seen here, in words.
        measurements: The numbers; the rule is about the first. Empty: not measured.
        verdict: `"yes"` or `"no"` if all seeds agree, else `"mixed"`; `"not measured"`.
        note: Why it was not measured, or what limits the number; may be empty.
    """

    key: str
    text: str
    figures: str
    rule: str
    measurements: tuple[Measurement, ...]
    verdict: str
    note: str = ""


def claims(figures: FigureSet) -> list[Claim]:
    """Return every claim of the paper with what was measured in one figure set.

    Losses are those of metrics.csv: the training loss is the running mean over an epoch. Runs are paired
    by seed; the baseline of a comparison is, seed by seed, the better of the two that SGD gives.

    Args:
        figures: The figure set.
    """
    return [_close_to_zero(figures), *_against_sgd(figures), _near_1(figures), _insensitive(figures)]


def claims_table(figures: FigureSet) -> str:
    """Return the claims as text, in lines of at most 100 characters.

    Args:
        figures: The figure set.
    """
    kind = "SYNTHETIC images" if figures.kind == "synthetic" else "real images"
    title = f"Claims of the paper, {kind}, {figures.scale} scale, on {figures.device}"
    return claims_text(title, claims(figures))


def claims_text(title: str, found: Sequence[Claim]) -> str:
    """Return claims with what was measured as text, in lines of at most 100 characters.

    Args:
        title: The first line.
        found: The claims.
    """
    lines = [title]
    for claim in found:
        details = [f"{measurement.name}: {measurement.text}" for measurement in claim.measurements]
        details += [claim.note] if claim.note else []
        lines += ["", *_wrapped(f"[{claim.verdict}] {claim.text} (figure {claim.figures})", "")]
        lines += [line for detail in (f"rule: {claim.rule}", *details) for line in _wrapped(detail, "    ")]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent + "  ")


def _close_to_zero(figures: FigureSet) -> Claim:
    runs = _runs(figures, "afad", "ggn_fixup")
    values = {}
    for seed, rows in runs.items():
        losses = _finite(rows[rows.epoch <= WITHIN_EPOCHS], "train_loss").train_loss
        values[seed] = float(losses.min()) if len(losses) else math.inf
    ends = min(map(_num_epochs, runs.values()), default=WITHIN_EPOCHS)
    name = f"least training loss of GGN within {WITHIN_EPOCHS} epochs (1: predicting the mean)"
    return _claim(
        figures,
        "close_to_zero",
        f"On AFAD-LITE GGN's training loss gets close to zero within {WITHIN_EPOCHS} epochs",
        "afad",
        f"at most {CLOSE_TO_ZERO:g} of the variance of the targets",
        (Measurement(name, values),),
        lambda value: value <= CLOSE_TO_ZERO,
        f"these runs end after {ends} epochs" if ends < WITHIN_EPOCHS else "",
    )


def _against_sgd(figures: FigureSet) -> list[Claim]:
    """Return the claims that compare GGN, seed by seed, with the better of the two SGD baselines."""
    ahead = "training loss of the better SGD over GGN's, {} (0: GGN has none or diverged)"
    per_epoch, per_second = "at the last epoch that all have", "when the first of them ends"
    sooner = "seconds until the better SGD has its least test loss, over GGN's until it gets there (0: never)"
    lower = f"test loss of the better SGD over GGN's, {per_epoch}"
    by_epoch, by_second = (
        ratio_at_common_end("train_loss", "epoch"),
        ratio_at_common_end("train_loss", "train_s"),
    )
    cases: list[tuple[str, str, str, str, Score, str | None]] = []
    for family, name in (("afad", "AFAD-LITE"), ("rsna", "RSNA")):
        text, key = f"On {name} GGN is ahead of both SGD baselines per ", f"{family}_ahead_per_"
        cases.append((f"{key}epoch", family, f"{text}epoch", ahead.format(per_epoch), by_epoch, None))
        cases.append((f"{key}second", family, f"{text}second", ahead.format(per_second), by_second, None))
    text, at_end = "On RSNA GGN's test loss ", ratio_at_common_end("test_loss", "epoch")
    cases.append(("test_falls_faster", "rsna", f"{text}falls faster", sooner, speed, "2a"))
    cases.append(("test_ends_lower", "rsna", f"{text}ends lower", lower, at_end, "2a"))
    return [
        _claim(
            figures,
            *(key, text, family, "the ratio is above 1"),
            (Measurement(name, _paired(figures, family, score)),),
            lambda value: value > 1,
            shown=shown,
            needed=_COMPARED,
        )
        for key, family, text, name, score, shown in cases
    ]


def _near_1(figures: FigureSet) -> Claim:
    measured = []
    if (grid := figures.grid) is not None:
        least = grid.losses.groupby(["seed", "lam"]).loss.min().unstack("lam").reindex(columns=grid.lams)
        # A seed that was run with some lambdas only says nothing about the best one.
        whole = least.dropna()
        whole = whole[whole.min(axis=1) < math.inf]
        best = {
            seed: min(own.index, key=lambda lam: (own[lam], abs(math.log(lam))))
            for seed, own in whole.iterrows()
        }
        measured.append(Measurement("λ of the least training loss in the grid", best))
        for lam, found in least.items():
            name = f"least training loss at epoch {grid.epoch} with λ = {lam:g} (inf: all diverged)"
            if found.notna().any():
                measured.append(Measurement(name, found.dropna().to_dict()))
    low, high = NEAR_1
    return _claim(
        figures,
        *("lambda_near_1", "λ near 1 is best", "grid"),
        f"the λ of the least loss is from {low:g} to {high:g}",
        tuple(measured),
        lambda value: low <= value <= high,
    )


def _insensitive(figures: FigureSet) -> Claim:
    measured: list[Measurement] = []
    losses = pd.DataFrame({"lam": []}) if figures.grid is None else figures.grid.losses
    for lam in sorted(losses.lam.unique()):
        found = losses[losses.lam == lam]
        low, high = found.alpha.min(), found.alpha.max()
        name = f"largest over least loss with λ = {lam:g}, α from {low:g} to {high:g} (inf: diverged)"
        ends = found.groupby("seed").loss.agg(["min", "max"])
        spread = (ends["max"] / ends["min"]).where((ends["min"] > 0) & (ends["min"] < math.inf), math.inf)
        # That of lambda = 1 first: the rule is about it.
        measured.insert(0 if lam == 1 else len(measured), Measurement(name, spread.to_dict()))
    return _claim(
        figures,
        *("alpha_hardly_matters", "With λ = 1, α hardly matters", "grid"),
        f"the largest loss over α is at most {HARDLY:g} times the least",
        tuple(measured) if (losses.lam == 1).any() else (),
        lambda value: value <= HARDLY,
    )


def _claim(
    figures: FigureSet,
    key: str,
    text: str,
    family: str,
    rule: str,
    measurements: tuple[Measurement, ...],
    holds: Callable[[float], bool],
    note: str = "",
    shown: str | None = None,
    needed: Sequence[str] = (),
) -> Claim:
    panels = [panel for panel in PANELS if panel.family == family and panel.column == "train_loss"]
    numbers = shown or ", ".join(panel.number for panel in panels)
    if not measurements or not measurements[0].values:
        command = _missing_run(figures, family, needed) or panels[0].command
        why = _several_settings(figures, family) or f"make the runs, e.g. {command}"
        return Claim(key, text, numbers, rule, (), "not measured", why)
    seen = {holds(value) for value in measurements[0].values.values()}
    verdict = "mixed" if len(seen) > 1 else ("yes" if seen == {True} else "no")
    return Claim(key, text, numbers, rule, measurements, verdict, note)


def _paired(figures: FigureSet, family: str, score: Score) -> dict[int, float]:
    """Return a score of GGN against both SGD baselines, for each seed that has all three."""
    ggn, *baselines = (_runs(figures, family, curve) for curve in _COMPARED)
    return {
        seed: score(rows, [found[seed] for found in baselines])
        for seed, rows in ggn.items()
        if all(seed in found for found in baselines)
    }


def ratio_at_common_end(column: str, axis: str) -> Score:
    """Return the score "better baseline's value of a loss over GGN's, where the first run ends".

    `axis` is `"epoch"` or `"train_s"`; a run's value is that of its last whole epoch until then.
    """

    def score(ggn: pd.DataFrame, baselines: Sequence[pd.DataFrame]) -> float:
        # A run that diverged is infinite from there on; it does not shorten the others.
        ends = [run[axis].fillna(0.0).max() for run in (ggn, *baselines) if not _diverged(run)]
        end = min(ends, default=0.0)
        *others, own = (_value_at(run, column, run[axis] <= end) for run in (*baselines, ggn))
        if math.isinf(own):
            return 0.0
        return min(others) / own if own > 0 else math.inf

    return score


def speed(ggn: pd.DataFrame, baselines: Sequence[pd.DataFrame]) -> float:
    """Return the time until the baselines' least test loss over the time that GGN takes to reach it.

    Returns:
        Ratio of seconds of training; 0 if GGN never gets there, infinite if no baseline has a test loss.
    """
    rows = pd.concat([_finite(run, "test_loss") for run in baselines])
    if rows.empty:
        return math.inf
    least = rows.sort_values(["test_loss", "train_s"]).iloc[0]
    own = _finite(ggn, "test_loss")
    reached = own.train_s[own.test_loss <= least.test_loss]
    return float(least.train_s / reached.iloc[0]) if len(reached) and reached.iloc[0] else 0.0


def _runs(figures: FigureSet, family: str, curve: str) -> dict[int, pd.DataFrame]:
    """Return the rows of one of the paper's curves, e.g. of `fig1/afad_sgd_bn`, by seed.

    Empty if its runs have several settings: then no single number describes it.
    """
    if family not in figures.curves:
        return {}
    rows = figures.curves[family].rows
    rows = rows[rows.experiment == f"fig1/{family}_{curve}"]
    if rows.setting.nunique() > 1:
        return {}
    return {int(seed): rows[rows.seed == seed] for seed in rows.seed.unique()}


def _missing_run(figures: FigureSet, family: str, needed: Sequence[str]) -> str | None:
    """Return the command of a run that a comparison lacks, None if it lacks none."""
    found = {curve: _runs(figures, family, curve) for curve in needed}
    seeds = {seed for runs in found.values() for seed in runs}
    # The seed that the most curves have lacks the fewest runs.
    seed = min(seeds, key=lambda seed: (-sum(seed in runs for runs in found.values()), seed), default=0)
    for curve, runs in found.items():
        if seed not in runs:
            words = [f"python train.py experiment=fig1/{family}_{curve}"]
            words += [f"dataset={family}_synthetic"] if figures.kind == "synthetic" else []
            words += [f"trainer={figures.scale}"] if figures.scale in ("laptop", "paper") else []
            return " ".join([*words, *([f"seed={seed}"] if seed else [])])
    return None


def _several_settings(figures: FigureSet, family: str) -> str | None:
    """Return which of the paper's curves has runs of several settings, None if each has one."""
    if family not in figures.curves:
        return None
    rows = figures.curves[family].rows.drop_duplicates("setting")
    for experiment, runs in rows[rows.experiment.str.startswith("fig1/")].groupby("experiment"):
        if len(runs) > 1:
            one, other = runs.run.iloc[:2]
            return f"{experiment} has several settings, e.g. in {one} and {other}: name the folders of one of them"
    return None


def _diverged(rows: pd.DataFrame) -> bool:
    return bool(rows.state.iloc[0] == "diverged")


def _num_epochs(rows: pd.DataFrame) -> int:
    last = rows.epoch.max()
    return 0 if pd.isna(last) else int(last)


def _finite(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the rows with a finite value; none of a run that diverged."""
    return rows[np.isfinite(rows[column].astype(float)) & (rows.state != "diverged")]


def _value_at(rows: pd.DataFrame, column: str, until: pd.Series) -> float:
    """Return the last finite value of some rows; infinite if the run diverged or has none."""
    values = _finite(rows[until.fillna(False).astype(bool)], column)[column]
    return float(values.iloc[-1]) if len(values) else math.inf
