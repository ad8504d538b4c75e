"""The theory's studies: sweeps with ordinary records, and figures, statements and results files from their table."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from house import House, read_rows, read_run

from gramgn.figures import (
    Theory,
    drawings,
    make_figures,
    read_runs,
    read_table,
    theory_claims,
    theory_runs,
    theory_title,
)
from gramgn.records import runs, write_results

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "outputs" / "results"
SETTING = {
    **{"source": "", "sweep": "theory_quadratic", "state": "done", "began": "2026", "optimizer": "ggn"},
    **{"order": "cyclic", "dataset": "sphere", "kind": "synthetic", "activation": "erf"},
    **{"n": 100, "d": 20, "M": 128, "batch_size": "full", "lam": 1.0, "alpha_sum": 0.0, "seed": 0},
    **{"kernel_gap": 0.5, "rho": 0.0},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[House, str]:
    """Return a house with all studies at the smoke scale, and what was printed."""
    house = House(tmp_path_factory.mktemp("theory") / "house")
    done = house.script("scripts/theory.py", "--smoke")
    assert done.returncode == 0, done.stderr
    return house, done.stdout


def test_studies_are_sweeps(made: tuple[House, str]) -> None:
    house, printed = made
    sweeps = house.root / "outputs" / "sweeps"
    assert {path.name for path in sweeps.iterdir()} == {
        f"theory-smoke-{study}" for study in ("quadratic", "cyclic", "methods")
    }
    assert "order of convergence" in printed
    assert "SYNTHETIC sphere" in printed
    table = runs(sweeps)
    assert set(table.state) == {"done"}
    assert set(table.M) == {64, 128}
    assert (table[table.epoch == 0].drift_G == 0).all()
    (descent,) = table[(table.optimizer == "gradient_descent") & (table.seed == 0)].run.unique()
    row = read_rows(sweeps / descent.removeprefix("sweeps/"))[0]
    assert float(row["residual"]) == pytest.approx(float(row["linear_residual"]))


def test_the_same_command_keeps_finished_runs(made: tuple[House, str]) -> None:
    house, _ = made
    before = {folder: read_run(folder) for folder in house.runs()}
    done = house.script("scripts/theory.py", "--smoke", "quadratic")
    assert done.returncode == 0, done.stderr
    assert {folder: read_run(folder) for folder in house.runs()} == before


def test_figures_from_runs_and_from_their_results_file(made: tuple[House, str], tmp_path: Path) -> None:
    """Both show the same: T1 to T4, and T5 from a file of costs next to them."""
    house, _ = made
    outputs = house.root / "outputs"
    path = tmp_path / "theory.csv"
    write_results(runs(outputs), path)
    costs = RESULTS / "theory_cost.csv"
    drawn = make_figures(read_runs(outputs, costs), tmp_path / "runs")
    assert [file.name for file in drawn if file.suffix == ".png"] == [
        f"theory-{name}.png" for name in ("T1-quadratic", "T2-width", "T3-cyclic", "T4-methods", "T5-cost")
    ]
    again = make_figures(read_runs(path, costs), tmp_path / "results")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in drawn]


def test_a_damaged_file_of_costs_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "theory_cost.csv"
    lines = (RESULTS / "theory_cost.csv").read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "resnet32,32"]))
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "make_figures.py"), "--results", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "theory_cost.csv is not a file of costs" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_benchmark_of_costs_writes_such_a_file(tmp_path: Path) -> None:
    path = tmp_path / "theory" / "theory_cost.csv"
    words = [sys.executable, str(REPOSITORY / "benchmarks" / "cost.py"), "--smoke", "--out", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(pd.read_csv(path).columns) == list(pd.read_csv(RESULTS / "theory_cost.csv").columns)
    assert set(read_runs(tmp_path).theory.costs.b) == {4, 8}


def drawn_from(table: pd.DataFrame, folder: Path) -> tuple[list[str], list[str]]:
    """Return the stems of what a table gives, with any warning an error, and the lines about what is left out."""
    lines: list[str] = []
    folder.mkdir(exist_ok=True)
    write_results(table, folder / "theory.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, shown = read_table(folder / "theory.csv", report=lines.append)
        stems = [each.stem for each in drawings(shown, report=lines.append) if each.render("png")]
        theory_claims(shown.theory)
    return stems, lines


@pytest.fixture(scope="module")
def published() -> pd.DataFrame:
    """Return the published quadratic study at two widths."""
    table = runs(RESULTS / "theory_quadratic.csv")
    return table[(table.M <= 256) & (table.seed < 3)].reset_index(drop=True)


def test_other_data_is_not_in_the_same_figure(published: pd.DataFrame, tmp_path: Path) -> None:
    """Those like the newest run are shown, and one line says so; a repeated run counts once."""
    others = published.assign(
        n=50, run=published.run + "-n50", began="2026-01-01T00:00:00Z", activation="gelu"
    )
    newest = published.assign(run=published.run + "-new", began="2026-02-01T00:00:00Z")
    table = pd.concat([published, others, newest], ignore_index=True)
    stems, lines = drawn_from(table, tmp_path)
    assert stems == ["theory-T1-quadratic", "theory-T2-width"]
    assert [line for line in lines if "left out 6 runs of the theory" in line]


@pytest.mark.parametrize(
    "change",
    [
        {"residual": [0.9, 0.0, 0.0, 0.0]},
        {"residual": [0.9, 0.3, 0.0, 0.0], "drift_J": [0.0] * 4, "drift_G": [0.0] * 4, "kernel_gap": 0.0},
        {"residual": [1.0, 1e30, 1e60, 1e90]},
        {"sweep": "theory_cyclic", "batch_size": 20, "rho": 0.8},
        {"sweep": "theory_cyclic", "batch_size": 20, "rho": 1.5},
        {
            "sweep": "theory_cyclic",
            "batch_size": 20,
            "rho": None,
            "order": "shuffle",
            "linear_residual": None,
        },
        {"sweep": "theory_methods", "rho": 1e6},
        {"sweep": "theory_methods", "optimizer": "gradient_descent", "lam": None, "alpha_sum": None},
        {"dataset": r"$\frac$ cost $"},
    ],
    ids=str,
)
def test_one_run_of_any_numbers_is_drawn(
    published: pd.DataFrame, change: dict[str, Any], tmp_path: Path
) -> None:
    first = published[published.run == published.run[0]].head(4)
    stems, lines = drawn_from(first.assign(epochs=3, **change), tmp_path)
    assert stems
    assert not lines


def run_of(residuals: list[float], *, every: int = 1, drift: float = 1.0, **setting: Any) -> pd.DataFrame:
    """Return the rows of a run with given residuals, measured at every so many epochs."""
    setting = SETTING | setting
    epochs = [every * t for t in range(len(residuals))]
    linear = [residuals[0] * setting["rho"] ** t for t in epochs]
    measured = {"epoch": epochs, "residual": residuals, "linear_residual": linear, "epochs": epochs[-1]}
    name = f"{setting['M']} {setting['seed']}"
    return pd.DataFrame(measured).assign(run=name, drift_J=drift, drift_G=drift, **setting)


def theory_of(*runs: pd.DataFrame) -> Theory:
    """Return what a study of some runs measured."""
    lines: list[str] = []
    theory = Theory(theory_runs(pd.concat(runs, ignore_index=True), lines.append))
    assert not lines
    return theory


def test_title_states_the_data() -> None:
    residuals = [0.9, 0.3, 0.03]
    assert theory_title(theory_of(run_of(residuals))) == "The theory: SYNTHETIC sphere"
    real = theory_of(run_of(residuals, kind="real", dataset="digits"))
    assert theory_title(real) == "The theory: digits (real)"


def quadratic_runs(power: float, slope: float) -> Theory:
    """Return runs of the given order whose constant and drifts fall as M^slope."""
    runs = []
    for seed in range(3):
        for M in (128, 512, 2048):
            fall = (M / 128) ** slope
            residuals = [0.9]
            for _ in range(4):
                residuals.append(0.8 * fall * residuals[-1] ** power)
            runs.append(run_of(residuals, M=M, seed=seed, kernel_gap=fall, drift=fall))
    return theory_of(*runs)


@pytest.mark.parametrize(
    ("power", "slope", "expected"),
    [
        (
            2.0,
            -0.5,
            {"order": "yes", "constant": "yes", "drift_G": "yes", "drift_J": "yes", "kernel_gap": "yes"},
        ),
        (
            2.0,
            -1.0,
            {"order": "yes", "constant": "yes", "drift_G": "yes", "drift_J": "no", "kernel_gap": "no"},
        ),
        (1.5, -0.3, {"order": "no", "drift_G": "no", "drift_J": "no", "kernel_gap": "no"}),
    ],
)
def test_verdicts_about_the_full_batch(power: float, slope: float, expected: dict[str, str]) -> None:
    claims = {claim.key: claim for claim in theory_claims(quadratic_runs(power, slope))}
    assert {key: claims[key].verdict for key in expected} == expected
    assert claims["order"].measurements[0].median == pytest.approx(power)
    assert claims["kernel_gap"].measurements[0].median == pytest.approx(slope)
    assert claims["contraction"].verdict == claims["cost_A"].verdict == "not measured"


@pytest.mark.parametrize(("c", "verdict"), [(0.8, "yes"), (0.805, "yes"), (0.75, "no"), (0.85, "no")])
def test_verdicts_about_mini_batches(c: float, verdict: str) -> None:
    cyclic: dict[str, Any] = {"sweep": "theory_cyclic", "batch_size": 20, "rho": 0.8}
    theory = theory_of(*(run_of([3 * c**t for t in range(40)], seed=seed, **cyclic) for seed in range(3)))
    claim = {claim.key: claim for claim in theory_claims(theory)}["contraction"]
    assert claim.verdict == verdict
    assert claim.measurements[0].median == pytest.approx((1 - c) / 0.2 - 1, abs=1e-9)


def test_contraction_counts_epochs_not_rows() -> None:
    residuals = [0.9**t for t in range(0, 31, 3)]
    theory = theory_of(run_of(residuals, every=3, sweep="theory_cyclic", batch_size=20, rho=0.9))
    assert theory.runs.c.item() == pytest.approx(0.9)
    assert theory.runs.c_A.item() == pytest.approx(0.9)


def test_fitted_costs() -> None:
    """Exponents of made-up times come out as they were put in."""
    shapes = [("resnet32", 400_000, b) for b in (16, 64, 128)] + [("resnet8", 80_000, 128)]
    costs = pd.DataFrame(
        [(name, m, b, turn) for turn in (1, 2) for name, m, b in shapes],
        columns=["network", "m", "b", "round"],
    )
    b, m = costs.b, costs.m
    costs = costs.assign(pixels=32, step_s=1.0, forward_s=b * 1e-4, backward_s=b * 1e-4, blocks_s=b * 1e-4)
    costs = costs.assign(gram_s=1e-12 * b**2 * m, solve_s=1e-9 * b**3, sgd_s=2e-4 * b)
    claims = {claim.key: claim for claim in theory_claims(Theory(costs=costs))}
    medians = {each.name: each.median for each in claims["exponents"].measurements}
    assert medians["exponent of b in the time of (A), forward and per-sample backward"] == pytest.approx(1)
    assert medians["exponent of b in the time of the Gram product"] == pytest.approx(2)
    assert medians["exponent of b in the time of the solve"] == pytest.approx(3)
    assert medians["exponent of m in the time of the Gram product"] == pytest.approx(1)
    assert claims["cost_A"].measurements[0].median == pytest.approx(1.5)
    assert claims["cost_B"].verdict == "yes"
