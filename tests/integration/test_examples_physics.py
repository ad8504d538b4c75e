"""The examples of physics in a short form: every problem, every optimizer, the picture and the file."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from gramgn import GramGaussNewton

FALLS = {
    "poisson_2d": (20, 0.1),
    "poisson_5d": (3, 1.0),
    "heat": (8, 0.9),
    "coefficient": (25, 0.5),
    "deeponet": (12, 0.5),
    "lennard_jones": (30, 0.9),
}
"""Steps of Gram-Gauss-Newton, and what is left of the first error at most."""


@pytest.fixture
def compare(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(repository / "examples" / "physics"))
    before, dtype = set(sys.modules), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield importlib.import_module("compare")
    torch.set_default_dtype(dtype)
    # Their names are too short to stay.
    for name in set(sys.modules) - before:
        if "examples" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues:RuntimeWarning")
@pytest.mark.parametrize("name", FALLS)
def test_the_error_falls(compare: Any, name: str) -> None:
    steps, share = FALLS[name]
    problem = compare.PROBLEMS[name]()
    torch.manual_seed(0)
    model = problem.model()
    first = problem.error(model)
    for _ in islice(compare.ggn(model, problem, lambda: 0.0), steps):
        pass
    assert problem.error(model) < share * first


@pytest.mark.parametrize("name", FALLS)
def test_all_optimizers_see_one_loss(compare: Any, name: str) -> None:
    problem = compare.PROBLEMS[name]()
    torch.manual_seed(0)
    model = problem.model()
    terms = problem.draw()
    loss = float(compare.loss_of(model, terms).detach())
    assert GramGaussNewton(model, lam=1.0, alpha=1.0).step(terms=terms).loss == pytest.approx(loss)


def test_every_problem_is_tested(compare: Any) -> None:
    assert set(FALLS) == set(compare.PROBLEMS)


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues:RuntimeWarning")
def test_comparison_and_picture(compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    medians = compare.compare("coefficient", 0.3, 1, ["ggn", "adam", "lbfgs"], tmp_path)
    assert set(medians) == {"ggn", "adam", "lbfgs"}
    assert "coefficient: adam lr 0.001: relative error" in capsys.readouterr().out
    assert (tmp_path / "coefficient.png").stat().st_size > 5000
    with (tmp_path / "coefficient.csv").open() as file:
        rows = list(csv.DictReader(file))
    for optimizer in medians:
        own = [row for row in rows if row["optimizer"] == optimizer]
        assert float(own[-1]["seconds"]) >= 0.3
        assert float(own[-1]["error"]) == pytest.approx(medians[optimizer], rel=1e-3)
