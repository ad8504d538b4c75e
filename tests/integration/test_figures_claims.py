"""The paper's claims as numbers: each on runs whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figure_runs
import pytest
from figure_runs import CURVES, add_run, dataset_of
from figure_views import only_set

from gramgn.figures import Claim, claims, claims_table
from gramgn.records import RunFolder

KEYS = [
    "close_to_zero",
    "afad_ahead_per_epoch",
    "afad_ahead_per_second",
    "rsna_ahead_per_epoch",
    "rsna_ahead_per_second",
    "test_falls_faster",
    "test_ends_lower",
    "lambda_near_1",
    "alpha_hardly_matters",
]


def add(root: Path, family: str, curve: str, losses: Sequence[float], seed: int = 0, **more: Any) -> None:
    optimizer, model, folder = CURVES[curve]
    add_run(
        root / f"{family}-{curve}-{seed}",
        losses,
        optimizer=optimizer,
        model=model,
        seed=seed,
        dataset=dataset_of(family, "real", "years"),
        choices={"experiment": f"{folder}/{family}_{curve}"},
        **more,
    )


def add_cell(root: Path, lam: float, alpha: float, loss: float, seed: int = 0) -> None:
    place = {"lam": lam, "alpha": alpha, "seed": seed, "dataset": dataset_of("rsna", "real", "months")}
    ending: dict[str, Any] = (
        {"losses": [9.0], "state": "diverged"} if math.isinf(loss) else {"losses": [loss] * 10}
    )
    figure_runs.add_cell(root / f"{lam}-{alpha}-{seed}", epochs=10, **place, **ending)


def found(root: Path) -> dict[str, Claim]:
    return {claim.key: claim for claim in claims(only_set(root))}


def test_every_claim_is_there_even_without_runs_for_it(tmp_path: Path) -> None:
    add(tmp_path, "afad", "sgd_bn", [1.0])
    measured = found(tmp_path)
    assert list(measured) == KEYS
    assert {claim.verdict for claim in measured.values()} == {"not measured"}
    assert all("python train.py" in claim.note for claim in measured.values())
    assert [claim.figures for claim in measured.values()] == ["1a, 1b"] * 3 + ["1c, 1d"] * 2 + ["2a"] * 2 + [
        "2c"
    ] * 2


def test_close_to_zero_is_the_least_loss_of_thirty_epochs_over_seeds(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.02, 0.04, 0.03)):
        add(tmp_path, "afad", "ggn_fixup", [1.0] * 29 + [loss, 0.001], seed)
    claim = found(tmp_path)["close_to_zero"]
    assert claim.verdict == "yes"
    assert claim.measurements[0].text == "0.03 (0.02 to 0.04, 3 seeds)"
    assert claim.note == ""
    other = tmp_path / "other"
    add(other, "afad", "ggn_fixup", [1.0, 0.04], 0)
    add(other, "afad", "ggn_fixup", [1.0, 0.06], 1)
    claim = found(other)["close_to_zero"]
    assert (claim.verdict, claim.note) == ("mixed", "these runs end after 2 epochs")


def test_ahead_per_epoch_and_per_second_are_different_numbers(tmp_path: Path) -> None:
    """An epoch of GGN takes twice as long here: ahead per epoch, behind per second."""
    add(tmp_path, "afad", "ggn_fixup", [1.0, 0.8, 0.2, 0.1], seconds=2.0)
    add(tmp_path, "afad", "sgd_bn", [0.9, 0.7, 0.5, 0.4], seconds=1.0)
    add(tmp_path, "afad", "sgd_fixup", [1.0, 0.9, 0.9, 0.9], seconds=1.0)
    measured = found(tmp_path)
    per_epoch, per_second = measured["afad_ahead_per_epoch"], measured["afad_ahead_per_second"]
    assert per_epoch.measurements[0].values == {0: pytest.approx(4.0)}
    # After 4 seconds: two epochs of GGN, four of SGD.
    assert per_second.measurements[0].values == {0: pytest.approx(0.5)}
    assert (per_epoch.verdict, per_second.verdict) == ("yes", "no")


def test_seeds_are_paired_and_one_without_all_three_curves_is_not_compared(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.1, 0.5, 0.1)):
        add(tmp_path, "rsna", "ggn_fixup", [1.0, loss], seed)
        add(tmp_path, "rsna", "sgd_bn", [1.0, 0.2], seed)
    for seed in (0, 1):
        add(tmp_path, "rsna", "sgd_fixup", [1.0, 0.9], seed)
    claim = found(tmp_path)["rsna_ahead_per_epoch"]
    assert claim.measurements[0].values == {0: pytest.approx(2.0), 1: pytest.approx(0.4)}
    assert claim.verdict == "mixed"


@pytest.mark.parametrize(
    ("diverging", "value", "verdict"), [("ggn_fixup", 0.0, "no"), ("sgd_bn", 9.0, "yes")]
)
def test_a_diverged_run_loses_and_does_not_shorten_the_others(
    tmp_path: Path, diverging: str, value: float, verdict: str
) -> None:
    for curve, end in (("ggn_fixup", 0.1), ("sgd_bn", 0.2), ("sgd_fixup", 0.9)):
        if curve == diverging:
            add(tmp_path, "rsna", curve, [9.0, math.nan], state="diverged", epochs=4)
        else:
            add(tmp_path, "rsna", curve, [1.0, 0.95, 0.95, end])
    for key in ("rsna_ahead_per_epoch", "rsna_ahead_per_second", "test_ends_lower"):
        claim = found(tmp_path)[key]
        assert claim.measurements[0].values == {0: pytest.approx(value)}, key
        assert claim.verdict == verdict


def test_falls_faster_is_the_time_to_the_baselines_least_test_loss(tmp_path: Path) -> None:
    add(tmp_path, "rsna", "ggn_fixup", [1.0] * 4, test_losses=[1.0, 0.3, 0.2, 0.3], seconds=3.0)
    add(tmp_path, "rsna", "sgd_bn", [1.0] * 4, test_losses=[1.0, 0.5, 0.4, 0.3], seconds=2.0)
    add(tmp_path, "rsna", "sgd_fixup", [1.0] * 4, test_losses=[1.0, 0.9, 0.9, 0.9], seconds=2.0)
    measured = found(tmp_path)
    # SGD has 0.3 after 8 seconds, GGN after 6.
    assert measured["test_falls_faster"].measurements[0].values == {0: pytest.approx(8 / 6)}
    assert measured["test_ends_lower"].measurements[0].values == {0: pytest.approx(1.0)}
    assert measured["test_ends_lower"].verdict == "no"
    never = tmp_path / "never"
    add(never, "rsna", "ggn_fixup", [1.0] * 2, test_losses=[1.0, 0.4])
    add(never, "rsna", "sgd_bn", [1.0] * 2, test_losses=[1.0, 0.3])
    add(never, "rsna", "sgd_fixup", [1.0] * 2, test_losses=[1.0, 0.9])
    claim = found(never)["test_falls_faster"]
    assert (claim.measurements[0].values, claim.verdict) == ({0: 0.0}, "no")


def test_the_best_lambda_and_the_spread_over_alpha_come_from_the_grid(tmp_path: Path) -> None:
    losses = {
        (0.25, 0.1): math.inf,
        (0.25, 1.0): math.inf,
        (1.0, 0.1): 0.1,
        (1.0, 1.0): 0.15,
        (4.0, 0.1): math.inf,
        (4.0, 1.0): 0.4,
    }
    for (lam, alpha), loss in losses.items():
        for seed in (0, 1):
            add_cell(tmp_path, lam, alpha, loss * (1 + seed), seed)
    # A third seed of one lambda says nothing about the best one.
    add_cell(tmp_path, 4.0, 1.0, 0.001, seed=2)
    measured = found(tmp_path)
    near, hardly = measured["lambda_near_1"], measured["alpha_hardly_matters"]
    assert near.measurements[0].values == {0: 1.0, 1: 1.0}
    assert [each.values[0] for each in near.measurements[1:]] == [math.inf, 0.1, 0.4]
    assert near.verdict == "yes"
    assert hardly.measurements[0].values == {0: pytest.approx(1.5), 1: pytest.approx(1.5)}
    assert "λ = 1, α from 0.1 to 1" in hardly.measurements[0].name
    assert [each.values[0] for each in hardly.measurements[1:]] == [math.inf, math.inf]
    assert hardly.verdict == "yes"


def test_a_diverged_alpha_at_lambda_one_matters(tmp_path: Path) -> None:
    for alpha, loss in ((0.1, math.inf), (1.0, 0.1), (3.0, 0.1)):
        add_cell(tmp_path, 1.0, alpha, loss)
    assert found(tmp_path)["alpha_hardly_matters"].verdict == "no"


def test_a_lambda_that_has_only_failed_says_nothing(tmp_path: Path) -> None:
    add_cell(tmp_path, 1.0, 0.1, 0.1)
    add_cell(tmp_path, 2.0, 0.1, 0.1)
    RunFolder(tmp_path / "2.0-0.1-0").update_run(state="failed")
    claim = found(tmp_path)["alpha_hardly_matters"]
    assert [each.text for each in claim.measurements] == ["1 (1 seed)"]


def test_no_claim_about_alpha_without_lambda_one(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        add_cell(tmp_path, 2.0, alpha, 0.1)
    assert found(tmp_path)["alpha_hardly_matters"].verdict == "not measured"


def test_a_comparison_that_lacks_a_baseline_names_a_missing_run(tmp_path: Path) -> None:
    """F01: the command makes a run that is not there yet, with the seed of the others."""
    for curve in ("ggn_fixup", "sgd_bn"):
        add(tmp_path, "afad", curve, [1.0, 0.5], 3)
    note = found(tmp_path)["afad_ahead_per_epoch"].note
    run = "experiment=fig1/afad_sgd_fixup trainer=laptop seed=3"
    assert note == f"make the runs, e.g. python train.py {run}"


def test_the_text_fits_and_names_data_and_scale(tmp_path: Path) -> None:
    for curve in ("ggn_fixup", "sgd_bn", "sgd_fixup"):
        for seed in (0, 1, 2):
            add(tmp_path, "afad", curve, [1.0, 0.123456789 * (1 + seed)], seed)
    add_cell(tmp_path, 1.0, 0.1, 0.1)
    text = claims_table(only_set(tmp_path))
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("Claims of the paper, real images, laptop scale, on Abacus 2000\n")
    assert "[no] On AFAD-LITE GGN is ahead of both SGD baselines per epoch (figure 1a, 1b)" in text
