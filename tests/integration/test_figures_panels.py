"""The paper's panels: which runs they show, and what they show of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from figure_runs import add_cell, add_curve, add_paper_runs, add_run, dataset_of
from figure_views import drawn, only_set, silent, texts

from gramgn.figures import (
    claims,
    drawings,
    figure_sets,
    load_runs,
    read_results,
    summary_table,
    write_results,
)
from gramgn.figures._draw_page import draw_page
from gramgn.figures._style import house_style, line_styles
from gramgn.records import RunFolder

RSNA = dataset_of("rsna", "synthetic", "months")
AFAD = dataset_of("afad", "synthetic", "years")
KEYS = ["fig1a", "fig1b", "fig1c", "fig1d", "fig2a-time", "fig2a-epoch", "fig2b", "fig2c"]


def edit(folder: Path, **changes: Any) -> None:
    RunFolder(folder).update_run(**changes)


def test_one_call_draws_all_panels_and_the_page(tmp_path: Path) -> None:
    add_paper_runs(tmp_path / "runs", epochs=3)
    found = drawings(load_runs(tmp_path / "runs"), report=silent)
    assert [drawing.stem for drawing in found] == [f"{key}-synthetic-laptop" for key in [*KEYS, "paper"]]
    assert [drawing.panel.number if drawing.panel else None for drawing in found] == [
        *("1a", "1b", "1c", "1d", "2a", "2a", "2b", "2c"),
        None,
    ]


def test_panels_show_the_recorded_numbers(tmp_path: Path) -> None:
    add_curve(tmp_path, "fig1/rsna_ggn_fixup", "ggn", "resnet_fixup", 0, 3, RSNA)
    (run,) = load_runs(tmp_path).runs
    expected = {
        "fig1c": ("train_s", "train_loss", "training time (s)", "training loss (MSE, standardised)"),
        "fig1d": ("epoch", "train_loss", "epoch", "training loss (MSE, standardised)"),
        "fig2a-time": ("train_s", "test_loss", "training time (s)", "test loss (MSE, standardised)"),
        "fig2a-epoch": ("epoch", "test_loss", "epoch", "test loss (MSE, standardised)"),
    }
    figures = only_set(tmp_path)
    assert [panel.key for panel in figures.panels] == list(expected)
    for key, (x, y, x_label, y_label) in expected.items():
        (axes,) = drawn(figures, key).axes
        assert axes.get_lines()[0].get_xydata().tolist() == [[row[x], row[y]] for row in run.rows]
        assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == (x_label, y_label, "log")


def test_figures_say_what_data_scale_seeds_and_device_they_are_of(tmp_path: Path) -> None:
    add_paper_runs(tmp_path, epochs=2)
    figures = only_set(tmp_path)
    for panel in figures.panels:
        words = texts(drawn(figures, panel.key))
        for word in ("stand-in (SYNTHETIC images)", "32×32 pixels", "images, laptop scale", "Abacus 2000"):
            assert word in words, panel.key
        assert ("3 seeds" if panel.key < "fig2b" else "1 seed") in words, panel.key
    with house_style():
        assert "SYNTHETIC stand-in images, laptop scale, on Abacus 2000" in texts(draw_page(figures))


def test_ours_is_marked_and_a_curve_has_one_colour_everywhere(tmp_path: Path) -> None:
    add_paper_runs(tmp_path, epochs=8, seeds=(0,))
    figures = only_set(tmp_path)
    with house_style():
        page = draw_page(figures)
    panels = [drawn(figures, key).axes[0] for key in KEYS[:6]]
    styles = {}
    for axes in [*panels, *page.axes[:6]]:
        for curve, line in zip(figures.curves["afad"].curves, axes.get_lines(), strict=False):
            look = (line.get_color(), line.get_linestyle(), line.get_marker(), line.get_markerfacecolor())
            assert styles.setdefault(curve.label, look) == look
    assert len(set(styles.values())) == 4
    ours = "ours: GGN, SPRING on ResNetGN"
    assert styles[ours][2:] == ("o", "white")
    assert all(look[2] == "None" for label, look in styles.items() if label != ours)
    assert styles[ours][1] != "-"
    papers = [curve.label for curve in figures.curves["curves"].curves].index("λ = 1, α = 0.1 (the paper's)")
    assert drawn(figures, "fig2b").axes[0].get_lines()[papers].get_color() == styles["GGN on ResNetFixup"][0]


def test_lines_of_a_panel_differ_in_their_dashes(tmp_path: Path) -> None:
    """Grey print leaves nothing else to tell them apart."""
    add_paper_runs(tmp_path, epochs=3, seeds=(0,))
    figures = only_set(tmp_path)
    for family in ("rsna", "curves"):
        styles = line_styles(figures.curves[family].curves)
        assert (
            len({style.dashes for style in styles}) == len({style.color for style in styles}) == len(styles)
        )


def test_seeds_that_start_from_their_own_networks_are_one_curve(tmp_path: Path) -> None:
    """Seeds differ in the path of their warm start; a start that was asked for by hand is another setting."""
    for seed in (0, 1, 2):
        add_curve(tmp_path, "fig1/rsna_sgd_bn", "sgd", "resnet_bn", seed, 3, RSNA)
    add_curve(
        tmp_path / "x", "fig1/rsna_sgd_bn", "sgd", "resnet_bn", 3, 3, RSNA, overrides=["init_from=other"]
    )
    figures = only_set(tmp_path)
    (curve,) = figures.curves["rsna"].curves
    assert [run.seed for run in curve.runs] == ["0", "1", "2"]
    (note,) = figures.notes
    assert "without 1 run of fig1/rsna_sgd_bn with other settings than the 3 shown" in note
    assert "init_from outputs/sweeps/afad/seed=3, not None" in note


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dataset": {"kind": "real"}}, "real-laptop"),
        ({"scale": "paper"}, "synthetic-paper"),
        ({"device": {"kind": "cuda", "name": "Fast 9"}}, "synthetic-laptop-32-Fast_9"),
        ({"dataset": {"image_size": 64}}, "synthetic-laptop-64-Abacus_2000"),
    ],
)
def test_other_kinds_scales_devices_and_sizes_are_figures_of_their_own(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    for curve, optimizer, model in (("ggn_fixup", "ggn", "resnet_fixup"), ("sgd_bn", "sgd", "resnet_bn")):
        add_curve(tmp_path / "a", f"fig1/rsna_{curve}", optimizer, model, 0, 2, RSNA)
    data = RSNA | change.pop("dataset", {})
    add_curve(tmp_path / "b", "fig1/rsna_sgd_fixup", "sgd", "resnet_fixup", 0, 2, data, **change)
    sets, rest = figure_sets(load_runs(tmp_path))
    assert sorted(figures.name for figures in sets) == sorted(["synthetic-laptop", name])
    assert [len(figures.runs("rsna")) for figures in sets if figures.name == "synthetic-laptop"] == [2]
    assert rest == []


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": {"manifest_sha256": "other"}},
        {"dataset": {"summary": {"used": 99}}},
        {"threads": 1},
        {"choices": {"sweep": "sgd_lr"}},
        {"dataset": {"name": "rotation"}},
    ],
)
def test_what_cannot_be_joined_is_left_out_of_the_panel_and_drawn_elsewhere(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    for seed in (0, 1):
        add_curve(tmp_path / "a", "fig1/rsna_ggn_fixup", "ggn", "resnet_fixup", seed, 2, RSNA)
    other = add_curve(tmp_path / "b", "fig1/rsna_sgd_bn", "sgd", "resnet_bn", 0, 2, RSNA).path
    record = RunFolder(other).read_run()
    edit(
        other,
        **{key: {**record[key], **new} if isinstance(new, dict) else new for key, new in change.items()},
    )
    loaded = load_runs(tmp_path)
    (figures,), rest = figure_sets(loaded)
    assert [curve.label for curve in figures.curves["rsna"].curves] == ["GGN on ResNetFixup"]
    assert [run.optimizer for run in rest] == ["sgd"]
    named = "choices" not in change and change.get("dataset") != {"name": "rotation"}
    assert len(figures.notes) == int(named)
    assert any(drawing.stem.startswith("loss-") for drawing in drawings(loaded, report=silent))


def test_a_quick_trial_does_not_replace_the_published_curve(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        add_curve(tmp_path / "a", "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 4, AFAD)
    trial = add_curve(
        tmp_path / "b", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 2, AFAD, began="2027-01-01T00:00:00Z"
    )
    figures = only_set(tmp_path)
    assert len(figures.runs("afad")) == 3
    assert f"b/{trial.path.parent.name}" in figures.notes[0]
    assert "trainer.epochs 2, not 4" in figures.notes[0]


def test_two_runs_of_one_setting_and_seed_count_once(tmp_path: Path) -> None:
    """Also where one of them was started by sweep=seeds."""
    add_curve(tmp_path / "old", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 3, AFAD)
    new = add_curve(
        tmp_path / "new", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 3, AFAD, began="2027-01-01T00:00:00Z"
    )
    edit(new.path, choices={**new.read_run()["choices"], "sweep": "seeds"})
    loaded = load_runs(tmp_path)
    assert len(loaded.omitted) == 1
    assert "repeated later by new/" in loaded.omitted[0]
    assert [run.path for run in only_set(tmp_path).runs("afad")] == [loaded.runs[0].path]


def test_runs_of_two_versions_of_the_code_are_said(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_curve(tmp_path, "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 2, AFAD)
    last = add_curve(tmp_path, "fig1/afad_sgd_bn", "sgd", "resnet_bn", 2, 2, AFAD)
    git = {"commit": "deadbeef999", "dirty": True, "diff_sha256": "1234567"}
    edit(last.path, git=git, starts=[{"time_utc": "2026-01-01T00:00:00Z", "git": git}])
    lines: list[str] = []
    drawings(load_runs(tmp_path), report=lines.append)
    assert lines == [
        "figure 1a, 1b: its runs are of 2 versions of the code: c0ffeec0ff (2), deadbeef99+123456 (1)",
    ]


def test_a_page_with_gaps_says_how_to_fill_them(tmp_path: Path) -> None:
    add_curve(tmp_path, "fig1/rsna_ggn_fixup", "ggn", "resnet_fixup", 0, 2, RSNA)
    with house_style():
        words = texts(draw_page(only_set(tmp_path)))
    for command in ("experiment=fig1/afad_ggn_fixup", "sweep=lambda_alpha", "sweep=lambda_alpha_curves"):
        assert f"python train.py {command}" in words


def test_a_run_that_diverged_at_once_is_in_its_panel(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_curve(tmp_path, "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 3, AFAD)
    add_run(
        tmp_path / "x",
        [],
        epochs=3,
        state="diverged",
        seed=0,
        dataset=AFAD,
        settings={"lam": 1.0, "alpha": 0.3},
        choices={"experiment": "fig1/afad_ggn_fixup"},
    )
    figure = drawn(only_set(tmp_path), "fig1a")
    assert "GGN on ResNetFixup (1 seed, 1 diverged)" in texts(figure)
    assert "SGD on ResNetBN (2 seeds)" in texts(figure)


@pytest.mark.parametrize("value", [None, "text", 3, 1.5, True, [], [None], {}, {"x": []}])
def test_a_run_json_with_anything_anywhere_is_drawn_or_named(tmp_path: Path, value: Any) -> None:
    """Each entry replaced in turn: no traceback, and the sound run beside it is always there."""
    add_curve(tmp_path / "sound", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 2, AFAD)
    sample = add_cell(tmp_path / "sample", epochs=10).path
    record = json.loads((sample / "run.json").read_text())
    places = [place for place in paths(record) if place[0] not in ("format", "state")]
    shutil.rmtree(sample)
    for number, place in enumerate(places):
        spoiled = json.loads(json.dumps(record))
        parent = spoiled
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
        folder = add_cell(tmp_path / f"{number}", epochs=10).path
        (folder / "run.json").write_text(json.dumps(spoiled))
        loaded = load_runs(tmp_path)
        sets, _ = figure_sets(loaded)
        assert any(figures.runs("afad") for figures in sets), place
        for figures in sets:
            claims(figures)
        drawings(loaded, report=silent)
        write_results(loaded, tmp_path / "results.csv", report=silent)
        read_results([tmp_path / "results.csv"])
        summary_table(loaded.runs)
        shutil.rmtree(folder)


def paths(tree: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each entry of nested mappings and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in pairs:
        found += [(*before, key), *paths(value, (*before, key))]
    return found
