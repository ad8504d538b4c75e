"""The claims of the paper, each beside the number measured here, with its spread over seeds."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ._grid import Grid
from ._panels import PANELS, FigureSet
from ._scores import losses_of, named, num_epochs, paired, ratio_at_equal_time, ratio_at_last_epoch, speed

CLOSE_TO_ZERO = 0.05  # of the variance of the targets
WITHIN_EPOCHS = 30
NEAR_1 = (0.5, 2.0)
HARDLY = 2.0  # factor between the largest and the least loss over alpha


@dataclass(frozen=True)
class Measurement:
    """One number.

    Attributes:
        name: What was measured, in words.
        values: By seed; infinite or zero where a run diverged or a level was never reached.
        unit: What there is a value for each of.
    """

    name: str
    values: Mapping[str, float]
    unit: str = "seed"

    @property
    def median(self) -> float:
        """Median over seeds."""
        return statistics.median(self.values.values())

    @property
    def text(self) -> str:
        """Median, least and greatest, and the number of seeds, e.g. ``"2.1 (1.8 to 2.4, 3 seeds)"``."""
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
        figures: The panels that show it, e.g. ``"1a, 1b"``.
        rule: When it counts as seen here, in words.
        measurements: The numbers; the rule is about the first. Empty: not measured.
        verdict: ``"yes"`` or ``"no"`` if all seeds agree, else ``"mixed"``; ``"not measured"``.
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

    Losses are those of ``metrics.csv``: the training loss is the running mean over an epoch. Runs are paired
    by seed; the baseline of a comparison is, seed by seed, the better of the two that SGD gives.

    Args:
        figures: The figure set.
    """
    return [
        _close_to_zero(figures),
        *(claim for family in ("afad", "rsna") for claim in _ahead(figures, family)),
        *_test_loss(figures),
        _near_1(figures),
        _insensitive(figures),
    ]


def claims_table(figures: FigureSet) -> str:
    """Return the claims as text, in lines of at most 100 characters.

    Args:
        figures: The figure set.
    """
    kind = "SYNTHETIC stand-in images" if figures.kind == "synthetic" else "real images"
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
    values = {
        run.seed: min(losses_of(run, "train_loss", WITHIN_EPOCHS) or [math.inf])
        for run in named(figures, "afad", "ggn_fixup")
    }
    short = [run for run in named(figures, "afad", "ggn_fixup") if num_epochs(run) < WITHIN_EPOCHS]
    name = f"least training loss of GGN within {WITHIN_EPOCHS} epochs (1: predicting the mean)"
    return _claim(
        "close_to_zero",
        f"On AFAD-LITE GGN's training loss gets close to zero within {WITHIN_EPOCHS} epochs",
        "afad",
        f"at most {CLOSE_TO_ZERO:g} of the variance of the targets",
        (Measurement(name, values),),
        lambda value: value <= CLOSE_TO_ZERO,
        f"these runs end after {min(map(num_epochs, short))} epochs" if short else "",
    )


def _ahead(figures: FigureSet, family: str) -> list[Claim]:
    name = {"afad": "AFAD-LITE", "rsna": "RSNA"}[family]
    found = []
    for what, score in (("epoch", ratio_at_last_epoch), ("second", ratio_at_equal_time)):
        at = "at the last epoch that all have" if what == "epoch" else "when the first of them ends"
        measured = Measurement(
            f"training loss of the better SGD over GGN's, {at} (0: GGN has none or diverged)",
            paired(figures, family, score("train_loss")),
        )
        found.append(
            _claim(
                f"{family}_ahead_per_{what}",
                f"On {name} GGN is ahead of both SGD baselines per {what}",
                family,
                "the ratio is above 1",
                (measured,),
                lambda value: value > 1,
            )
        )
    return found


def _test_loss(figures: FigureSet) -> list[Claim]:
    faster = Measurement(
        "seconds until the better SGD has its least test loss, over GGN's until it gets there (0: never)",
        paired(figures, "rsna", speed),
    )
    lower = Measurement(
        "test loss of the better SGD over GGN's, at the last epoch that all have",
        paired(figures, "rsna", ratio_at_last_epoch("test_loss")),
    )
    text = "On RSNA GGN's test loss "
    above: tuple[str, Callable[[float], bool]] = ("the ratio is above 1", lambda value: value > 1)
    return [
        _claim("test_falls_faster", text + "falls faster", "rsna", above[0], (faster,), above[1], shown="2a"),
        _claim("test_ends_lower", text + "ends lower", "rsna", above[0], (lower,), above[1], shown="2a"),
    ]


def _near_1(figures: FigureSet) -> Claim:
    best: dict[str, float] = {}
    by_lam: list[Measurement] = []
    if figures.grid is not None:
        grid = figures.grid
        by_seed = {lam: _by_seed(grid, lam) for lam in grid.lams}
        # A seed that was run with some lambdas only says nothing about the best one.
        for seed in sorted(set.intersection(*(set(found) for found in by_seed.values()))):
            least = {lam: min(found[seed]) for lam, found in by_seed.items()}
            if min(least.values()) < math.inf:
                best[seed] = min(least, key=lambda lam: (least[lam], abs(math.log(lam))))
        for lam, found in by_seed.items():
            name = f"least training loss at epoch {grid.epoch} with λ = {lam:g} (inf: all diverged)"
            if found:
                by_lam.append(Measurement(name, {seed: min(losses) for seed, losses in found.items()}))
    low, high = NEAR_1
    return _claim(
        "lambda_near_1",
        "λ near 1 is best",
        "grid",
        f"the λ of the least loss is from {low:g} to {high:g}",
        (Measurement("λ of the least training loss in the grid", best), *by_lam),
        lambda value: low <= value <= high,
    )


def _insensitive(figures: FigureSet) -> Claim:
    measured: list[Measurement] = []
    lams = figures.grid.lams if figures.grid is not None else ()
    # That of lambda = 1 first: the rule is about it.
    for lam in sorted(lams, key=lambda lam: (lam != 1, lam)):
        assert figures.grid is not None
        seeds = _by_seed(figures.grid, lam)
        spread = {
            seed: max(losses) / min(losses) if 0 < min(losses) < math.inf else math.inf
            for seed, losses in seeds.items()
        }
        alphas = [alpha for alpha, cell in figures.grid.column(lam).items() if cell.losses]
        if not alphas:
            continue
        name = f"largest over least loss with λ = {lam:g}, α from {alphas[0]:g} to {alphas[-1]:g} (inf: diverged)"
        if lam == 1 or measured:
            measured.append(Measurement(name, spread))
    return _claim(
        "alpha_hardly_matters",
        "With λ = 1, α hardly matters",
        "grid",
        f"the largest loss over α is at most {HARDLY:g} times the least",
        tuple(measured),
        lambda value: value <= HARDLY,
    )


def _by_seed(grid: Grid, lam: float) -> dict[str, list[float]]:
    """Return the losses of one lambda over alpha for each seed, infinite where it diverged."""
    found: dict[str, list[float]] = {}
    for cell in grid.column(lam).values():
        for seed, loss in cell.losses.items():
            found.setdefault(seed, []).append(loss)
    return found


def _claim(
    key: str,
    text: str,
    family: str,
    rule: str,
    measurements: tuple[Measurement, ...],
    holds: Callable[[float], bool],
    note: str = "",
    shown: str | None = None,
) -> Claim:
    panels = [panel for panel in PANELS if panel.family == family and panel.column == "train_loss"]
    numbers = shown or ", ".join(panel.number for panel in panels)
    if not measurements or not measurements[0].values:
        return Claim(key, text, numbers, rule, (), "not measured", f"make the runs, e.g. {panels[0].command}")
    seen = {holds(value) for value in measurements[0].values.values()}
    verdict = "mixed" if len(seen) > 1 else ("yes" if seen == {True} else "no")
    return Claim(key, text, numbers, rule, measurements, verdict, note)
