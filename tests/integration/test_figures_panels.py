"""The paper's panels: which runs they show, what they show of them, and that drawn values are the recorded ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_runs import add_curve, add_paper_runs, add_run, dataset_of, write_rows
from figure_views import drawn, labels, listed, notes, only_set, shown, texts, xy

from gramgn.figures import (
    Drawing,
    claims_table,
    figure_sets,
    house_style,
    make_figures,
    read_runs,
    summary_table,
)
from gramgn.records import RunFolder, runs, write_results

RSNA = dataset_of("rsna", "synthetic", "months")
AFAD = dataset_of("afad", "synthetic", "years")
PUBLISHED = "outputs/results/paper_laptop_synthetic.csv"


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs as the paper's sweeps leave them."""
    root = tmp_path_factory.mktemp("paper") / "runs"
    add_paper_runs(root, epochs=3, seeds=(0, 1, 2))
    return root


@pytest.fixture(scope="module")
def figures(paper: Path) -> dict[str, Drawing]:
    """Return the figures of these runs."""
    return listed(paper)


def test_one_call_draws_all_panels_and_the_page(figures: dict[str, Drawing]) -> None:
    found = figures
    keys = ["fig1a", "fig1b", "fig1c", "fig1d", "fig2a-time", "fig2a-epoch", "fig2b", "fig2c", "paper"]
    assert list(found) == [f"{key}-synthetic-laptop" for key in keys]
    assert [drawing.panel.number if drawing.panel else None for drawing in found.values()] == [
        *("1a", "1b", "1c", "1d", "2a", "2a", "2b", "2c"),
        None,
    ]


def test_what_is_drawn_is_what_the_published_csv_holds(repository: Path) -> None:
    """Every line is the median over seeds, every band the range, every cell the median of its file's column."""
    table = pd.read_csv(repository / PUBLISHED)
    found = listed(repository / PUBLISHED)
    names = ("ggn_fixup", "sgd_fixup", "sgd_bn")
    for family, stem, column in (
        ("afad", "fig1a", "train_loss"),
        ("afad", "fig1b", "train_loss"),
        ("rsna", "fig1c", "train_loss"),
        ("rsna", "fig1d", "train_loss"),
        ("rsna", "fig2a-time", "test_loss"),
        ("rsna", "fig2a-epoch", "test_loss"),
    ):
        with house_style():
            figure = found[f"{stem}-synthetic-laptop"].draw()
        assert figure is not None
        experiments = [*(f"fig1/{family}_{name}" for name in names), f"ours/{family}_ggn_spring_gn"]
        (axes,) = figure.axes
        for experiment, line, band in zip(experiments, axes.get_lines(), axes.collections, strict=False):
            rows = table[(table.experiment == experiment) & table.sweep.isin(["seeds", np.nan])]
            by_epoch = rows.groupby("epoch")
            x = by_epoch.train_s.median() if panel_is_timed(stem) else pd.Series(by_epoch.epoch.first())
            scale = 1.0 if by_epoch.train_s.max().max() < 300 else 60.0
            expected = x / scale if panel_is_timed(stem) else x
            assert line.get_xdata() == pytest.approx(expected.to_numpy())
            assert line.get_ydata() == pytest.approx(by_epoch[column].median().to_numpy())
            heights = band.get_paths()[0].vertices[:, 1]
            assert heights.min() == pytest.approx(rows[column].min())
            assert heights.max() == pytest.approx(rows[column].max())
    grid = found["fig2c-synthetic-laptop"].grid
    assert grid is not None
    cells = table[(table.sweep == "lambda_alpha")].sort_values("epoch").drop_duplicates("run", keep="last")
    losses = cells.train_loss.where((cells.state == "done") & (cells.epoch == 10), np.inf)
    medians = losses.groupby([cells.lam, cells.alpha]).median()
    assert {pair: np.inf if cell.loss is None else cell.loss for pair, cell in grid.cells.items()} == dict(
        medians
    )
    assert grid.best_alphas() == {0.25: 3.0, 0.5: 1.0, 1.0: 0.3, 2.0: 0.03, 4.0: 0.03}


def panel_is_timed(stem: str) -> bool:
    return stem in ("fig1a", "fig1c", "fig2a-time")


def test_a_results_file_draws_the_same_as_its_runs(
    paper: Path, figures: dict[str, Drawing], tmp_path: Path
) -> None:
    """F03, F09: byte for byte, with the same claims and table, so that a reader redraws what was published."""
    path = tmp_path / "results.csv"
    write_results(runs(paper), path)
    for (stem, one), (other_stem, other) in zip(figures.items(), listed(path).items(), strict=True):
        assert stem == other_stem
        if stem.startswith(("fig1a", "fig2c")):
            assert one.render("png") == other.render("png"), stem
    one, other = shown(paper), shown(path)
    assert claims_table(figure_sets(one.rows)[0][0]) == claims_table(figure_sets(other.rows)[0][0])
    assert summary_table(one.finished) == summary_table(other.finished)


def test_figures_say_what_data_scale_seeds_and_device_they_are_of(figures: dict[str, Drawing]) -> None:
    for stem in ("fig1a", "fig2a-epoch", "fig2b", "fig2c"):
        words = texts(drawn(figures, stem))
        for word in ("stand-in (SYNTHETIC images)", "32×32 pixels", "images, laptop scale", "Abacus 2000"):
            assert word in words, stem
        assert ("3 seeds" if stem < "fig2b" else "1 seed") in words, stem
    assert "2 threads" in texts(drawn(figures, "fig1a"))
    assert "SYNTHETIC stand-in images, laptop scale, on Abacus 2000" in texts(drawn(figures, "paper"))
    axes = drawn(figures, "fig1a").axes[0]
    assert (axes.get_xlabel(), axes.get_yscale()) == ("training time (s)", "log")
    assert axes.get_ylabel() == "training loss (MSE, standardised)"
    assert "predicting the mean" in [text.get_text() for text in axes.texts]


def test_a_curve_looks_the_same_everywhere_and_differs_from_the_others(figures: dict[str, Drawing]) -> None:
    """By colour, by dashes (grey print leaves nothing else), and by circles if it is ours."""
    page = drawn(figures, "paper")
    panels = [drawn(figures, stem).axes[0] for stem in ("fig1a", "fig1d")]
    looks: dict[int, Any] = {}
    for axes in [*panels, *page.axes[:6]]:
        for place, line in enumerate(axes.get_lines()[:4]):
            look = (line.get_color(), str(line._dash_pattern), line.get_marker(), line.get_markerfacecolor())
            assert looks.setdefault(place, look) == look
    assert len({look[0] for look in looks.values()}) == len({look[1] for look in looks.values()}) == 4
    assert [look[2] for look in looks.values()] == ["None", "None", "None", "o"]
    assert looks[3][3] == "white"
    figure = drawn(figures, "fig2b")
    papers = [label.startswith("λ = 1, α = 0.1 (the paper's") for label in labels(figure)].index(True)
    assert figure.axes[0].get_lines()[papers].get_color() == looks[0][0]
    dashes = {str(line._dash_pattern) for line in figure.axes[0].get_lines()[:5]}
    assert len(dashes) == 5


def test_two_settings_of_a_curve_are_two_curves_and_no_claim(tmp_path: Path) -> None:
    """A quick trial neither replaces the published curve nor is hidden; claims ask for the folders of one."""
    for seed in (0, 1, 2):
        add_curve(tmp_path / "a", "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 4, AFAD)
        add_curve(tmp_path / "a", "fig1/afad_ggn_fixup", "ggn", "resnet_fixup", seed, 4, AFAD)
        add_curve(tmp_path / "a", "fig1/afad_sgd_fixup", "sgd", "resnet_fixup", seed, 4, AFAD)
    trial = add_curve(tmp_path / "b", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 2, AFAD)
    assert [label for label in labels(drawn(tmp_path, "fig1a")) if "ResNetBN" in label] == [
        "SGD on ResNetBN, epochs 4 (3 seeds)",
        "SGD on ResNetBN, epochs 2 (1 seed)",
    ]
    text = claims_table(only_set(tmp_path))
    assert "[not measured] On AFAD-LITE GGN is ahead of both SGD baselines per epoch" in text
    assert "name the folders of one of them" in " ".join(text.split())
    assert f"b/{trial.path.parent.name}" in " ".join(text.split())
    assert "[no] On AFAD-LITE GGN is ahead" in claims_table(only_set(tmp_path / "a"))


def test_seeds_that_start_from_their_own_networks_are_one_curve(tmp_path: Path) -> None:
    """Seeds differ in the path of their warm start; a start given on the command line is another setting."""
    for seed in (0, 1, 2):
        add_curve(tmp_path, "fig1/rsna_sgd_bn", "sgd", "resnet_bn", seed, 3, RSNA)
    assert labels(drawn(tmp_path, "fig1c")) == ["SGD on ResNetBN"]
    words = ["init_from=other"]
    add_curve(tmp_path / "x", "fig1/rsna_sgd_bn", "sgd", "resnet_bn", 3, 3, RSNA, overrides=words)
    assert (
        labels(drawn(tmp_path, "fig1c"))[1]
        == "SGD on ResNetBN, init_from outputs/sweeps/afad/seed=3 (1 seed)"
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dataset": {"kind": "real"}}, "real-laptop"),
        ({"scale": "paper"}, "synthetic-paper"),
        ({"device": {"kind": "cuda", "name": "Fast 9"}}, "synthetic-laptop-32-Fast_9"),
        ({"dataset": {"image_size": 64}}, "synthetic-laptop-64-Abacus_2000"),
        ({"dataset": {"manifest_sha256": "other"}}, "synthetic-laptop-2"),
        ({"dataset": {"summary": {"used": 99}}}, "synthetic-laptop-2"),
        ({"threads": 1}, "synthetic-laptop-2"),
    ],
)
def test_what_cannot_share_axes_is_a_figure_set_of_its_own(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    """The runs that began first have the plain name; a note says where the others are, if nothing else does."""
    add_curve(tmp_path / "a", "fig1/rsna_ggn_fixup", "ggn", "resnet_fixup", 0, 2, RSNA)
    data = RSNA | change.pop("dataset", {})
    later = {"began": "2026-02-01T00:00:00Z", **change}
    add_curve(tmp_path / "b", "fig1/rsna_sgd_fixup", "sgd", "resnet_fixup", 0, 2, data, **later)
    sets, rest = figure_sets(shown(tmp_path).rows)
    found = {figures.name: labels_of(figures) for figures in sets}
    assert found == {"synthetic-laptop": ["GGN on ResNetFixup"], name: ["SGD on ResNetFixup"]}
    assert rest.empty
    lines = notes(tmp_path)
    assert len(lines) == int(name == "synthetic-laptop-2")
    assert all("cannot share a panel" in line and "name the folders" in line for line in lines)


def test_no_two_figure_sets_have_one_name(tmp_path: Path) -> None:
    raw = {"trainer": {"epochs": 2, "scale": "laptop", "standardize_targets": False, "batch_size": 128}}
    for number in range(3):
        run = add_curve(tmp_path / f"{number}", "fig1/rsna_sgd_bn", "sgd", "resnet_bn", 0, 2, RSNA)
        changes = [{}, {"threads": 1}, {"config": run.read_run()["config"] | raw}][number]
        run.update_run(**changes)
    names = [figures.name for figures in figure_sets(shown(tmp_path).rows)[0]]
    assert names == ["synthetic-laptop", "synthetic-laptop-2", "synthetic-laptop-32-Abacus_2000"]


def labels_of(figures: Any) -> list[str]:
    return [curve.label for curve in figures.curves["rsna"].curves]


@pytest.mark.parametrize("change", [{"choices": {"sweep": "sgd_lr"}}, {"dataset": {"name": "rotation"}}])
def test_other_runs_are_in_no_panel_but_drawn(tmp_path: Path, change: dict[str, Any]) -> None:
    add_curve(tmp_path / "a", "fig1/rsna_ggn_fixup", "ggn", "resnet_fixup", 0, 2, RSNA)
    other = add_curve(tmp_path / "b", "fig1/rsna_sgd_bn", "sgd", "resnet_bn", 0, 2, RSNA)
    record = other.read_run()
    other.update_run(**{key: {**record[key], **new} for key, new in change.items()})
    assert labels(drawn(tmp_path, "fig1c")) == ["GGN on ResNetFixup"]
    assert labels(drawn(tmp_path, "loss-")) == ["SGD on ResNetBN"]


def test_two_runs_of_one_setting_and_seed_count_once(tmp_path: Path) -> None:
    """Also where one of them was started by sweep=seeds."""
    add_curve(tmp_path / "old", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 3, AFAD)
    later = {"began": "2027-01-01T00:00:00Z"}
    new = add_curve(tmp_path / "new", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 3, AFAD, **later)
    new.update_run(choices={**new.read_run()["choices"], "sweep": "seeds"})
    (line,) = notes(tmp_path)
    assert line.startswith("left out old/")
    assert "repeated later" in line
    assert set(only_set(tmp_path).curves["afad"].rows.run) == {f"new/{new.path.parent.name}/seed=0"}


def test_runs_of_two_versions_of_the_code_are_reported(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_curve(tmp_path, "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 2, AFAD)
    last = add_curve(tmp_path, "fig1/afad_sgd_bn", "sgd", "resnet_bn", 2, 2, AFAD)
    git = {"commit": "deadbeef999", "dirty": True, "diff_sha256": "1234567"}
    last.update_run(git=git, starts=[{"time_utc": "2026-01-01T00:00:00Z", "git": git}])
    assert notes(tmp_path) == [
        "figure 1a, 1b: its runs are of 2 versions of the code: c0ffeec0ff (2), deadbeef99+123456 (1)",
    ]


def test_a_page_with_gaps_says_how_to_fill_them(tmp_path: Path) -> None:
    add_curve(tmp_path, "fig1/rsna_ggn_fixup", "ggn", "resnet_fixup", 0, 2, RSNA)
    words = texts(drawn(tmp_path, "paper"))
    for command in ("experiment=fig1/afad_ggn_fixup", "sweep=lambda_alpha", "sweep=lambda_alpha_curves"):
        assert f"python train.py {command}" in words


def test_a_run_that_diverged_at_once_is_in_its_panel(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_curve(tmp_path, "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 3, AFAD)
    settings, choices = {"lam": 1.0, "alpha": 0.3}, {"experiment": "fig1/afad_ggn_fixup"}
    add_run(tmp_path / "x", [], epochs=3, state="diverged", dataset=AFAD, settings=settings, choices=choices)
    found = labels(drawn(tmp_path, "fig1a"))
    assert found == ["GGN on ResNetFixup (1 seed, 1 diverged)", "SGD on ResNetBN (2 seeds)"]


def curve_with(root: Path, **columns: list[Any]) -> RunFolder:
    """Write a run of figure 1a with these columns of metrics."""
    folder = add_curve(root, "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, len(columns["epoch"]), AFAD)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    write_rows(folder, [{"train_s": 2.0 * row["epoch"], **row} for row in rows])
    config = folder.read_run()["config"]
    folder.update_run(config=config | {"trainer": config["trainer"] | {"epochs": max(columns["epoch"])}})
    return folder


def test_a_missing_loss_interrupts_the_line_and_a_rare_evaluation_does_not(tmp_path: Path) -> None:
    curve_with(tmp_path, epoch=[1, 2, 3], train_loss=[1.0, "nan", 0.5], test_loss=[1.0, "", 0.5])
    assert str(xy(drawn(tmp_path, "fig1b").axes[0])) == "[[1.0, 1.0], [2.0, nan], [3.0, 0.5]]"
    rsna = add_curve(tmp_path / "r", "fig1/rsna_sgd_bn", "sgd", "resnet_bn", 0, 3, RSNA)
    write_rows(
        rsna,
        [{"epoch": e, "train_s": e, "train_loss": 1, "test_loss": "" if e == 2 else 0.5} for e in (1, 2, 3)],
    )
    assert xy(drawn(tmp_path, "fig2a-epoch").axes[0]) == [[1.0, 0.5], [3.0, 0.5]]


def test_a_loss_above_the_axis_is_marked_on_its_upper_end(tmp_path: Path) -> None:
    curve_with(tmp_path, epoch=[1, 2, 3], train_loss=[1.0, 81.0, 0.5])
    figure = drawn(tmp_path, "fig1b")
    (axes,) = figure.axes
    marks = [line for line in axes.get_lines() if line.get_marker() == "^"]
    assert marks[0].get_xydata().tolist() == [[2.0, axes.get_ylim()[1]]]
    assert "▲: above the axis" in texts(figure)


def test_a_loss_of_zero_is_marked_on_the_lower_end(tmp_path: Path) -> None:
    """F01: a logarithmic axis has no place for it; without a mark the curve would just end."""
    curve_with(tmp_path / "zero", epoch=[1, 2, 3], train_loss=[1.0, 0.5, 0.0], test_loss=[2.0, 0.0, 0.0])
    lost = add_curve(tmp_path / "lost", "fig1/afad_sgd_fixup", "sgd", "resnet_fixup", 0, 2, AFAD)
    write_rows(lost, [{"epoch": e, "train_s": e, "train_loss": 0, "test_loss": 1} for e in (1, 2)])
    lost.update_run(state="diverged")
    figure = drawn(tmp_path, "fig1b")
    (axes,) = figure.axes
    low = axes.get_ylim()[0]
    marks = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_marker() == "v"]
    assert sorted(marks) == [[[1.0, low], [2.0, low]], [[3.0, low]]]
    assert "▼: zero" in texts(figure)
    for path in (tmp_path / "zero").rglob("metrics.csv"):
        write_rows(RunFolder(path.parent), [{"epoch": e, "train_s": e, "train_loss": 0} for e in (1, 2, 3)])
    assert "no value above zero" in texts(drawn(tmp_path, "fig1b"))


def test_a_missing_time_is_that_of_the_epoch_before(tmp_path: Path) -> None:
    """Not 0, to which the curve would go back."""
    curve_with(tmp_path, epoch=[1, 2, 3], train_loss=[1.0, 0.5, 0.4], train_s=[1.0, "", 2.0])
    assert xy(drawn(tmp_path, "fig1a").axes[0]) == [[1.0, 1.0], [1.0, 0.5], [2.0, 0.4]]


def test_runs_of_zeros_and_of_nothing_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, loss in enumerate((0.0, math.nan)):
        source, out = tmp_path / f"{number}", tmp_path / "out"
        folder = add_run(source, [loss, loss])
        write_rows(folder, [{"epoch": epoch, "train_s": epoch, "train_loss": loss} for epoch in (1, 2)])
        assert make_figures(read_runs(source), out) == []
        assert "not drawn, as no run has a value above zero: Loss: rsna" in capsys.readouterr().err


def test_damaged_times_are_reported_and_a_repeated_epoch_counts_once(tmp_path: Path) -> None:
    """F01: left out with a note; if an epoch occurs twice, the last row is used."""
    curve_with(tmp_path / "twice", epoch=[1, 2, 2], train_loss=[1.0, 0.5, 0.4])
    add_curve(tmp_path / "good", "fig1/afad_sgd_fixup", "sgd", "resnet_fixup", 0, 2, AFAD)
    back = curve_with(tmp_path / "back", epoch=[1, 2], train_loss=[1.0, 0.5], train_s=[5.0, 4.0])
    early = curve_with(tmp_path / "early", epoch=[1, 2], train_loss=[1.0, 0.5], train_s=[-1.0, 4.0])
    unnamed = add_run(tmp_path / "unnamed", [0.5, 0.4], dataset={"kind": None})
    lines = "\n".join(notes(tmp_path))
    assert f"{back.path.relative_to(tmp_path)}: its training time goes backwards" in lines
    assert f"{early.path.relative_to(tmp_path)}: a training time is negative or infinite" in lines
    assert f"{unnamed.path.name}: its record does not say whether its data is real or synthetic" in lines
    figure = drawn(tmp_path, "fig1b")
    assert labels(figure) == ["SGD on ResNetFixup", "SGD on ResNetBN"]
    assert xy(figure.axes[0], 1) == [[1.0, 1.0], [2.0, 0.4]]


def test_plain_numbers_have_no_unit_and_one_thread_is_singular(tmp_path: Path) -> None:
    run = add_run(tmp_path / "x", [1.0, 0.5], dataset=dataset_of("sphere", "synthetic", "1"))
    assert drawn(tmp_path, "error").axes[0].get_ylabel() == "training error (mean absolute)"
    run.update_run(threads=1, dataset=AFAD | run.read_run()["dataset"] | {"name": "afad_synthetic"})
    run.update_run(choices={"experiment": "fig1/afad_sgd_bn"})
    assert "on Abacus 2000, 1 thread" in texts(drawn(tmp_path, "fig1b"))
