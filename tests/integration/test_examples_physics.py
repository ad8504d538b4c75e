"""The examples of physics in a short form: every problem, every optimizer, the files, the picture and the page."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from house import REPOSITORY

from gramgn import GramGaussNewton

FALLS = {
    "poisson_2d": (10, 0.1),
    "poisson_5d": (10, 0.4),
    "heat": (12, 0.2),
    "coefficient": (15, 0.2),
    "deeponet": (12, 0.6),
    "lennard_jones": (8, 0.5),
}
"""Steps of Gram-Gauss-Newton, and the share of the first error that may be left."""
PAGE = REPOSITORY / "docs" / "physics.md"
RESULTS = REPOSITORY / "outputs" / "results"


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """The modules of examples/physics, whose names are too short to stay importable."""
    before, dtype, path = set(sys.modules), torch.get_default_dtype(), list(sys.path)
    sys.path.insert(0, str(REPOSITORY / "examples" / "physics"))
    torch.set_default_dtype(torch.float64)
    yield {name: importlib.import_module(name) for name in ("problem", "optimizers", "compare", "report")}
    torch.set_default_dtype(dtype)
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if "examples" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_problem_is_tested(examples: dict[str, ModuleType]) -> None:
    assert set(FALLS) == set(examples["compare"].PROBLEMS)


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues:RuntimeWarning")
@pytest.mark.parametrize("name", FALLS)
def test_the_error_falls(examples: dict[str, ModuleType], name: str) -> None:
    steps, share = FALLS[name]
    problem = examples["compare"].PROBLEMS[name]()
    torch.manual_seed(0)
    model = problem.model()
    first = problem.error(model, 2)
    for _ in islice(examples["optimizers"].ggn(model, problem, lambda: 0.0, alpha=1e-4), steps):
        pass
    assert problem.error(model, 2) < share * first


@pytest.mark.parametrize("name", FALLS)
def test_all_optimizers_minimise_one_loss(examples: dict[str, ModuleType], name: str) -> None:
    """With a very large alpha, a step of Gram-Gauss-Newton goes along the gradient that the others see."""
    problem = examples["compare"].PROBLEMS[name]()
    torch.manual_seed(0)
    model, terms = problem.model(), problem.draw()
    examples["optimizers"].loss_of(model, terms).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    GramGaussNewton(model, lam=1.0, alpha=1e8).step(terms=terms)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert moved @ -gradient > 0.9999 * moved.norm() * gradient.norm()


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues:RuntimeWarning")
def test_a_comparison_is_chosen_kept_and_reported(
    examples: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, report = examples["compare"], examples["report"]
    table = compare.compare("coefficient", 0.2, 2, ["ggn", "adam", "lbfgs"], tmp_path)
    again = compare.Table(tmp_path / "physics_coefficient.csv")
    for optimizer in ("ggn", "adam", "lbfgs"):
        assert [len(curve) for curve in again.runs(optimizer)] == [
            len(curve) for curve in table.runs(optimizer)
        ]
        assert len(again.runs(optimizer)) == 2
        assert all(curve[-1][0] >= 0.2 for curve in again.runs(optimizer))
        tried = again.tried(optimizer)
        assert len(tried) == 5
        assert tried[again.chosen(optimizer)] == min(tried.values())
    written = (tmp_path / "physics_coefficient.csv").read_text()
    monkeypatch.setattr(compare, "trained", lambda *_: pytest.fail("runs that the file holds are run again"))
    compare.compare("coefficient", 0.2, 2, ["ggn", "adam", "lbfgs"], tmp_path)
    assert (tmp_path / "physics_coefficient.csv").read_text() == written
    (tmp_path / "page.md").write_text("before\n<!-- table: results -->\nold\n<!-- end -->\nafter\n")
    given = [
        "report.py",
        "--runs",
        str(tmp_path),
        "--page",
        str(tmp_path / "page.md"),
        "--figures",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", given)
    report.main()
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "`coefficient`" in page
    assert (tmp_path / "physics-coefficient.png").stat().st_size > 5000


def test_the_page_shows_the_published_runs(examples: dict[str, ModuleType]) -> None:
    """Tables that differ from the files are written again by `report.py`."""
    report, compare = examples["report"], examples["compare"]
    tables = {name: compare.Table(RESULTS / f"physics_{name}.csv") for name in compare.PROBLEMS}
    for table in tables.values():
        assert {len(table.runs(optimizer)) for optimizer in report.NAMES} == {3}
    page = PAGE.read_text(encoding="utf-8")
    for name, table in report.tables_of(tables).items():
        assert f"<!-- table: {name} -->\n{table}\n<!-- end -->" in page
    described = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6]
    for line, (name, problem) in zip(described, compare.PROBLEMS.items(), strict=True):
        assert line.startswith(f"| `{name}` |")
        assert f" {sum(p.numel() for p in problem().model().parameters()):,} |" in line
