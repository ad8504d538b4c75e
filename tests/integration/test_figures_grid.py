"""Figure 2c: the numbers in its cells, and what becomes of cells that have none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from figure_runs import ALPHAS, LAMS, add_cell, add_grid, add_run, dataset_of
from figure_views import drawn, labels, listed, notes, only_grid, texts
from matplotlib.colors import to_rgb

from gramgn.records import SweepFolder

RSNA = dataset_of("rsna", "synthetic", "months")
AFAD = dataset_of("afad", "synthetic", "years")


def test_cells_show_the_loss_of_epoch_ten(tmp_path: Path) -> None:
    add_cell(tmp_path / "a", losses=[1.0 / epoch for epoch in range(1, 31)])
    grid = only_grid(tmp_path)
    assert grid.epoch == 10
    assert grid.cell(1.0, 0.1).loss == 0.1


def test_a_shorter_sweep_shows_its_last_epoch_and_says_so(tmp_path: Path) -> None:
    add_cell(tmp_path / "a", losses=[0.5, 0.25])
    assert only_grid(tmp_path).cell(1.0, 0.1).loss == 0.25
    assert "training loss at epoch 2 (the last)" in texts(drawn(tmp_path, "fig2c"))


def test_the_axes_carry_the_values_and_lighter_is_higher(tmp_path: Path) -> None:
    add_grid(tmp_path, RSNA, lams=(1, 2, 4))
    grid = only_grid(tmp_path)
    axes = drawn(tmp_path, "fig2c").axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("λ", "α (mean convention)")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"{alpha:g}" for alpha in ALPHAS]
    cells = {}
    for patch in axes.patches:
        if patch.get_fill():
            x, y = patch.get_x() + 0.5, patch.get_y() + 0.5
            cells[round(x), round(y)] = patch.get_facecolor()[:3]
    by_loss = sorted(cells, key=lambda place: grid.cell(grid.lams[place[0]], grid.alphas[place[1]]).loss)
    shades = [cells[place][0] for place in by_loss]
    assert len(cells) == 24
    assert shades == sorted(shades)
    assert shades[0] < 0.2 < 0.9 < shades[-1]
    assert all(max(color) - min(color) < 0.01 for color in cells.values())


def test_cells_without_a_loss_are_marked_by_what_became_of_them(tmp_path: Path) -> None:
    """F01: diverged, failed, killed and missing cells are told from each other, and from a high loss, in grey too."""
    add_cell(tmp_path / "a", 0.1, lam=1.0, alpha=0.1)
    add_cell(tmp_path / "b", 30.0, lam=1.0, alpha=1.0)
    add_cell(tmp_path / "c", losses=[1.0, math.nan], epochs=10, state="diverged", lam=2.0, alpha=0.1)
    failed = {"type": "OutOfMemory", "message": "no memory"}
    add_cell(tmp_path / "d", losses=[1.0], epochs=10, state="failed", error=failed, lam=2.0, alpha=1.0)
    # Killed before its data was read: the record has no more than the name.
    killed = add_cell(tmp_path / "e", losses=[], epochs=10, state="running", lam=4.0, alpha=0.1)
    killed.update_run(dataset={"name": "rsna_synthetic"})
    assert notes(tmp_path) == [
        "left out d: failed (OutOfMemory: no memory)",
        "left out e: not finished (still running, or killed)",
    ]
    grid = only_grid(tmp_path)
    states = {(lam, alpha): grid.cell(lam, alpha).state for lam in (1.0, 2.0, 4.0) for alpha in (0.1, 1.0)}
    assert states == {
        (1.0, 0.1): "finite",
        (1.0, 1.0): "finite",
        (2.0, 0.1): "diverged",
        (2.0, 1.0): "failed",
        (4.0, 0.1): "unfinished",
        (4.0, 1.0): "not run",
    }
    figure = drawn(tmp_path, "fig2c")
    axes = figure.axes[0]
    signs = {
        (round(text.get_position()[0]), round(text.get_position()[1])): text.get_text() for text in axes.texts
    }
    assert [signs[place] for place in ((1, 0), (1, 1), (2, 0), (2, 1))] == ["×", "!", "…", ""]
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert [(patch.get_x(), patch.get_y()) for patch in hatched] == [(1.5, 0.5)]
    assert labels(figure) == ["best α of a λ", "× diverged", "! failed", "… not finished", "not run"]
    marks = {patch.get_facecolor()[:3] for patch in axes.patches if patch.get_fill() and patch.get_x() > 0}
    assert to_rgb("#EDEDED") not in marks


def test_a_half_finished_grid_shows_what_is_still_to_come(tmp_path: Path) -> None:
    """sweep.json knows of cells that have not begun; a damaged one is said, and what is there is drawn."""
    folder = tmp_path / "sweep"
    add_cell(folder / "0", lam=1.0, alpha=0.1)
    words = [
        f"optimizer.lam={lam} optimizer.alpha={alpha} seed=0".split() for lam in (1, 2) for alpha in (0.1, 30)
    ]
    cells = [{"folder": str(number), "overrides": each} for number, each in enumerate(words)]
    SweepFolder(folder).write({"cells": cells})
    grid = only_grid(tmp_path)
    assert (grid.lams, grid.alphas) == ([1.0, 2.0], [0.1, 30.0])
    states = [grid.cell(lam, alpha).state for lam in grid.lams for alpha in grid.alphas]
    assert states == ["finite", "not run", "not run", "not run"]
    axes = drawn(tmp_path, "fig2c").axes[0]
    assert "all" not in "".join(text.get_text() for text in axes.texts)
    assert notes(tmp_path) == []
    (folder / "sweep.json").write_text("{")
    (line,) = notes(tmp_path)
    assert "sweep.json" in line
    assert only_grid(tmp_path).lams == [1.0]


def test_a_lambda_without_a_finite_cell_is_said_to_have_diverged_whole(tmp_path: Path) -> None:
    add_grid(tmp_path, RSNA, lams=(1,))
    for alpha in (0.1, 100.0):
        add_cell(tmp_path / f"x{alpha}", losses=[9.0], epochs=10, state="diverged", lam=0.25, alpha=alpha)
    axes = drawn(tmp_path, "fig2c").axes[0]
    (text,) = (text for text in axes.texts if "all" in text.get_text())
    assert (text.get_text(), text.get_position()[0]) == ("all\ndiverged", 0)
    assert 0.25 not in only_grid(tmp_path).best_alphas()


def test_a_cell_of_several_seeds_shows_their_median_a_diverged_one_counted_as_infinite(
    tmp_path: Path,
) -> None:
    for seed, loss in enumerate((0.2, 0.1, 0.4)):
        add_cell(tmp_path / f"a{seed}", loss, seed=seed, alpha=0.1)
    for seed, loss in enumerate((0.2, 0.1)):
        add_cell(tmp_path / f"b{seed}", loss, seed=seed, alpha=1.0)
        add_cell(tmp_path / f"c{seed}", losses=[9.0], epochs=10, state="diverged", seed=seed, alpha=3.0)
    add_cell(tmp_path / "b2", losses=[9.0], epochs=10, state="diverged", seed=2, alpha=1.0)
    add_cell(tmp_path / "c2", 0.1, seed=2, alpha=3.0)
    grid = only_grid(tmp_path)
    assert [grid.cell(1.0, alpha).loss for alpha in (0.1, 1.0, 3.0)] == [0.2, 0.2, None]
    assert [grid.cell(1.0, alpha).num_diverged for alpha in (0.1, 1.0, 3.0)] == [0, 1, 2]
    figure = drawn(tmp_path, "fig2c")
    assert "1×" in texts(figure)
    assert "n×: n seeds diverged" in texts(figure)
    assert "median of 3 seeds" in texts(figure)


def test_a_nan_in_the_shown_epoch_is_no_loss(tmp_path: Path) -> None:
    add_cell(tmp_path / "a", alpha=0.1)
    add_cell(tmp_path / "b", losses=[0.5] * 9 + [math.nan], alpha=1.0)
    assert only_grid(tmp_path).cell(1.0, 1.0).state == "diverged"
    drawn(tmp_path, "fig2c")


def test_a_grid_of_zeros_is_drawn(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        add_cell(tmp_path / f"{alpha}", 0.0, alpha=alpha)
    axes = drawn(tmp_path, "fig2c").axes[0]
    assert [text.get_text() for text in axes.texts] == ["0", "0"]


def test_a_zero_among_others_takes_no_grey_from_them(tmp_path: Path) -> None:
    for alpha, loss in ((0.1, 0.0), (1.0, 0.5), (10.0, 1.0)):
        add_cell(tmp_path / f"{alpha}", loss, alpha=alpha)
    axes = drawn(tmp_path, "fig2c").axes[0]
    zero, low, high = (patch.get_facecolor()[0] for patch in axes.patches if patch.get_fill())
    assert zero == pytest.approx(low)
    assert high > low + 0.5


@pytest.mark.parametrize("loss", [1e-310, 1e308])
def test_losses_near_the_ends_of_float64_are_drawn(tmp_path: Path, loss: float) -> None:
    """A colour bar or an axis cannot reach them."""
    for alpha in (0.1, 1.0):
        add_cell(tmp_path / "grid" / f"{alpha}", loss, alpha=alpha)
    drawn(tmp_path / "grid", "fig2c")
    add_run(tmp_path / "curve", [loss, loss * 1.5])
    drawn(tmp_path / "curve", "loss")


def test_whole_numbers_from_a_command_line_are_the_same_values(tmp_path: Path) -> None:
    """optimizer.lam=1 is the 1.0 of conf/optimizer/ggn.yaml: one cell, one curve."""
    add_cell(tmp_path / "a", 0.2, lam=1, alpha=1)
    add_cell(tmp_path / "b", 0.4, lam=1.0, alpha=1.0, seed=1)
    grid = only_grid(tmp_path)
    assert list(grid.cells) == [(1.0, 1.0)]
    assert grid.cell(1.0, 1.0).loss == pytest.approx(0.3)


def test_two_grids_are_not_mixed(tmp_path: Path) -> None:
    """A grid on other images, or longer, is a figure of its own; the one that began first has the plain name."""
    add_grid(tmp_path / "a", RSNA, lams=(1, 2))
    later = {"began": "2027-01-01T00:00:00Z"}
    add_cell(tmp_path / "b", 0.0001, alpha=100.0, dataset=RSNA | {"summary": {"used": 99}}, **later)
    add_cell(tmp_path / "c", alpha=300.0, losses=[0.0001] * 20, **later)
    found = {stem: drawing.grid for stem, drawing in listed(tmp_path).items() if drawing.grid}
    assert [(stem, grid.alphas) for stem, grid in found.items() if grid] == [
        ("fig2c-synthetic-laptop", list(ALPHAS)),
        ("fig2c-synthetic-laptop-2", [100.0]),
        ("fig2c-synthetic-laptop-3", [300.0]),
    ]
    first, second = notes(tmp_path)
    assert "(99 images, not 2560)" in first
    assert "(20 epochs, not 10)" in second


def test_lambdas_of_the_named_sweep_are_those_of_these_tests(repository: Path) -> None:
    """The made-up grid has the axes of conf/sweep/lambda_alpha.yaml."""
    text = (repository / "conf" / "sweep" / "lambda_alpha.yaml").read_text()
    assert f"optimizer.lam: {','.join(f'{lam:g}' for lam in LAMS)}\n" in text
    assert f"optimizer.alpha: {','.join(f'{alpha:g}' for alpha in ALPHAS)} " in text


def test_any_grid_over_lambda_and_alpha_is_a_heatmap(tmp_path: Path) -> None:
    """An ad hoc sweep over both has one beside its curves; over one of them it has none; other settings part them."""
    for lam in (0.5, 1.0):
        for alpha in (0.1, 1.0, 10.0):
            for size in (32, 64):
                add_run(
                    tmp_path / f"{lam}-{alpha}-{size}",
                    [1.0, lam * alpha],
                    settings={"lam": lam, "alpha": alpha, "damping_convention": "mean"},
                    dataset=RSNA | {"image_size": size},
                )
    found = {stem: drawing.grid for stem, drawing in listed(tmp_path).items() if drawing.grid}
    name = "grid-rsna_synthetic-laptop-ggn-resnet_fixup"
    assert list(found) == [name, f"{name}-2"]
    for grid in found.values():
        assert grid is not None
        assert grid.rows.run.nunique() == 6
        assert grid.cell(0.5, 10.0).loss == 5.0
    row = tmp_path / "row"
    for alpha in (0.1, 1.0, 10.0):
        add_run(row / f"{alpha}", [1.0], settings={"lam": 1.0, "alpha": alpha}, dataset=RSNA)
    assert not any(drawing.grid for drawing in listed(row).values())


def test_a_cell_repeated_in_another_sweep_is_still_of_the_grid(tmp_path: Path) -> None:
    """The later twin replaces the run, not its place."""
    for place, (lam, alpha) in enumerate([(0.5, 0.1), (0.5, 1.0), (1.0, 0.1), (1.0, 1.0)]):
        settings = {"lam": lam, "alpha": alpha, "damping_convention": "mean"}
        add_run(tmp_path / "grid" / str(place), [1.0, 0.5], settings=settings, dataset=RSNA)
    twin = add_run(
        tmp_path / "seeds" / "0", [1.0, 0.5], settings=settings, dataset=RSNA, choices={"sweep": "seeds"}
    )
    twin.update_run(starts=[{"time_utc": "2999-01-01T00:00:00Z", "git": {}}])
    assert any("repeated later" in line for line in notes(tmp_path))
    (grid,) = [drawing.grid for drawing in listed(tmp_path).values() if drawing.grid]
    assert grid.cell(1.0, 1.0).loss == 0.5
