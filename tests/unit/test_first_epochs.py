"""The first epochs: what is measured is what training does, and page and figure show the published rows."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from types import ModuleType

import pytest

from gramgn.app import Job, compose_config, plain, register_resolvers, run_entries, set_repository, train
from gramgn.figures import draw_first_epochs, house_style, rows_by_seed
from gramgn.records import RunFolder, runs

REPOSITORY = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """Return a script as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("first_epochs")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield script("first_epochs_page")
    sys.modules.pop("first_epochs", None)


def test_the_page_holds_the_tables_of_the_published_rows(page: ModuleType) -> None:
    rows, text = page.read(), page.PAGE.read_text(encoding="utf-8")
    assert len({(row["dataset"], row["variant"]) for row in rows}) == 12
    assert page.filled(text, rows) == text
    assert text.count("<!-- table: ") == 4
    # A number that the rows do not have is found.
    assert page.filled(text.replace("| 0.", "| 1."), rows) == text


def test_the_text_says_what_the_rows_say(page: ModuleType) -> None:
    """The claims that stand in words: standstill, where the remedy is below the mean, and who raises no loss."""
    table = runs(REPOSITORY / "outputs" / "results" / "paper_laptop_synthetic.csv")
    faces = table[(table.experiment == "fig1/afad_ggn_fixup") & (table.epoch <= 10)]
    assert len(faces) == 30
    assert faces.train_loss.between(0.97, 1.03).all()
    rows = page.read()
    plain = rows_by_seed(rows, "rsna_synthetic", "plain")
    for dataset in page.NAMES:
        for steps in rows_by_seed(rows, dataset, "plain"):
            assert steps[0]["alpha_sum"] > 5 * steps[0]["mean_eigenvalue"]
    assert all(steps[-1]["alpha_sum"] < steps[-1]["mean_eigenvalue"] / 100 for steps in plain)
    remedy = rows_by_seed(rows, "rsna_synthetic", "trace + bound")
    assert all(page.epoch_loss(steps, 3) < 1 for steps in remedy)
    turned = rows_by_seed(rows, "rotation", "trace + bound + SPRING")
    assert not any(row["loss_after"] > row["loss"] for steps in turned for row in steps)
    (tuned,) = rows_by_seed(rows, "rotation", page.TUNED)
    for epoch in range(2, 19):
        own = [row for row in tuned if row["epoch"] == epoch]
        assert median(row["resolved"] for row in own) <= 7
        assert median(row["resolved_share"] for row in own) < 0.11
        assert median(row["loss_after"] for row in own) > 0.74 * median(row["loss"] for row in own)
    (adaptive,) = rows_by_seed(rows, "rsna_synthetic", "adaptive damping")
    assert min(row["rank"] for row in adaptive) == 1
    (drawn,) = rows_by_seed(rows, "rsna_synthetic", "last layer not zero")
    assert drawn[0]["mean_eigenvalue"] / plain[0][0]["mean_eigenvalue"] == pytest.approx(2, rel=0.1)
    assert drawn[0]["mean_eigenvalue"] < drawn[0]["alpha_sum"]


def test_the_figure_shows_the_values_of_the_published_rows(page: ModuleType) -> None:
    """F01: medians over seeds, of each step on the left and of the geometric mean of eight steps on the right."""
    rows = page.of_variants(page.read())
    with house_style():
        panels = draw_first_epochs(rows, page.NAMES, num_epochs=4).axes
    assert len(panels) == 6
    for axes, column in ((panels[0], "loss"), (panels[2], "alpha_sum"), (panels[4], "resolved_share")):
        lines = [line for line in axes.lines if len(line.get_xdata()) > 20]
        expected = by_step(rows, "rsna_synthetic", "plain", column, last=8)
        assert any(list(line.get_ydata()) == pytest.approx(expected) for line in lines), column
    for axes, dataset in (
        (panels[1], "rsna_synthetic"),
        (panels[3], "rotation"),
        (panels[5], "afad_synthetic"),
    ):
        named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        assert len(named) == len({row["variant"] for row in rows if row["dataset"] == dataset})
        for line in named:
            expected = by_step(rows, dataset, str(line.get_label()), "loss", last=4, window=8)
            assert list(line.get_ydata()) == pytest.approx(expected)


def by_step(
    rows: list[dict[str, float]], dataset: str, variant: str, column: str, *, last: int, window: int = 1
) -> list[float]:
    """Return the median over seeds of the geometric mean of the last few whole batches' values."""
    of_seeds: dict[float, list[float]] = {}
    for row in rows:
        if (row["dataset"], row["variant"], row["b"]) == (dataset, variant, 128) and row["epoch"] <= last:
            of_seeds.setdefault(row["seed"], []).append(row[column])
    if window == 1:
        return [median(each) for each in zip(*of_seeds.values(), strict=True)]
    means = [
        [
            math.exp(fmean(map(math.log, values[max(0, end - window) : end])))
            for end in range(1, len(values) + 1)
        ]
        for values in of_seeds.values()
    ]
    return [median(each) for each in zip(*means, strict=True)]


def test_what_is_measured_is_what_training_does(measuring: ModuleType, tmp_path: Path) -> None:
    """The losses are those of `train.py` with the same overrides, and the diagnostics those of a zero last layer."""
    set_repository(REPOSITORY)
    register_resolvers()
    words = measuring.overrides("rsna_synthetic", "trace + bound + SPRING", 0)
    words = ["trainer=debug" if word == "trainer=laptop" else word for word in words]
    words = ["trainer.epochs=2" if word.startswith("trainer.epochs") else word for word in words]
    words += [f"paths.{name}={tmp_path / name}" for name in ("raw", "prepared")]
    rows = list(measuring.measure(words))
    train(Job(run_entries(plain(compose_config(words))), {}, words, tmp_path / "run"))
    recorded = [row["train_loss"] for row in RunFolder(tmp_path / "run").read_metrics()]
    for epoch, loss in enumerate(recorded, start=1):
        own = [row for row in rows if row["epoch"] == epoch]
        assert sum(row["loss"] * row["b"] for row in own) / sum(row["b"] for row in own) == pytest.approx(
            loss
        )
    first = rows[0]
    assert (first["moved"], first["last_share"]) == (2, pytest.approx(1, rel=1e-5))
    assert first["rank"] <= 65
    assert all(0 <= row["resolved_share"] <= 1 + 1e-9 for row in rows)
    assert max(row["step_norm"] for row in rows) <= 0.3 * (1 + 1e-6)
