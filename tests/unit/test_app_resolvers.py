"""Which network to start from and which alpha was the best, from the records alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gramgn.app import plain, register_resolvers, set_repository
from gramgn.errors import ConfigError
from gramgn.records import RunFolder, SweepFolder

MODEL = {"_target_": "gramgn.models.ResNetFixup", "depth": 14}
SOURCE = "fig1/afad_ggn_fixup"


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path) -> Path:
    """Return the outputs/ of an empty repository."""
    set_repository(tmp_path)
    register_resolvers()
    return tmp_path / "outputs"


def write_run(
    folder: Path,
    *,
    state: str = "done",
    seed: int = 0,
    scale: str = "laptop",
    dataset: str = "afad_synthetic",
    depth: int = 14,
    experiment: str | None = SOURCE,
    sweep: str | None = None,
    lam: float = 1.0,
    alpha: float = 0.3,
    losses: tuple[float, ...] = (),
    time_utc: str = "2026-01-01T00:00:00Z",
) -> Path:
    """Write the records that a run leaves behind."""
    run = RunFolder.create(folder)
    choices = {"experiment": experiment, "sweep": sweep}
    config = {
        "seed": seed,
        "dataset": {"name": dataset},
        "model": {**MODEL, "depth": depth},
        "trainer": {"scale": scale, "epochs": 2},
        "optimizer": {"lam": lam, "alpha": alpha},
    }
    content = {
        "state": state,
        "choices": {name: choice for name, choice in choices.items() if choice},
        "config": config,
        "seed": seed,
        "group": folder.parent.name,
        "starts": [{"time_utc": time_utc}],
    }
    run.write_run(content)
    for epoch, loss in enumerate(losses, start=1):
        run.append_metrics({"epoch": epoch, "train_loss": loss})
    return folder


def asking(*, dataset: str | None = "afad", sweep: str | None = None, grid: str | None = None) -> DictConfig:
    """Return the part of a configuration that the resolvers look at."""
    return OmegaConf.create(
        {
            "init_from": f"${{gramgn.trained:{SOURCE}}}",
            "seed": 0,
            "warm_start": {"dataset": dataset, "sweep": sweep},
            "best_alpha": {"sweep": grid},
            "dataset": {"name": "rsna_synthetic"},
            "model": MODEL,
            "trainer": {"scale": "laptop", "epochs": 20},
            "optimizer": {"lam": 0.25, "alpha": 0.1},
        }
    )


def start(**given: str | None) -> str:
    found = plain(asking(**given))["init_from"]
    assert isinstance(found, str)
    return found


def test_one_run(outputs: Path) -> None:
    write_run(outputs / "runs" / "a")
    assert start() == "outputs/runs/a"


def test_of_several_the_oldest(outputs: Path) -> None:
    write_run(outputs / "runs" / "a", time_utc="2026-02-01T00:00:00Z")
    write_run(outputs / "runs" / "b", time_utc="2026-01-01T00:00:00Z")
    write_run(outputs / "runs" / "c", time_utc="2026-03-01T00:00:00Z")
    assert start() == "outputs/runs/b"


def test_of_several_the_one_that_fits(outputs: Path) -> None:
    """Another seed, scale, data set, network or experiment is another run; so is one that is not done."""
    for number, other in enumerate(
        (
            {"seed": 1},
            {"scale": "paper"},
            {"dataset": "afad"},
            {"depth": 20},
            {"experiment": "fig1/afad_sgd_fixup"},
            {"experiment": None},
            {"state": "diverged"},
            {"state": "interrupted"},
        )
    ):
        write_run(outputs / "runs" / f"a{number}", **other)  # type: ignore[arg-type]
    write_run(outputs / "sweeps" / "x" / "z", time_utc="2027-01-01T00:00:00Z")
    assert start() == "outputs/sweeps/x/z"


def test_in_a_sweep_of_a_name(outputs: Path) -> None:
    write_run(outputs / "sweeps" / "x" / "a")
    write_run(outputs / "sweeps" / "y" / "a", time_utc="2027-01-01T00:00:00Z")
    assert start(sweep="y") == "outputs/sweeps/y/a"
    with pytest.raises(ConfigError, match=r"no run .* in the sweep z .*2 of sweep|1 of sweep x"):
        start(sweep="z")


def test_none_names_the_command_that_makes_it(outputs: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        start()
    message = str(raised.value)
    assert "there is no run of fig1/afad_ggn_fixup with seed 0 at scale laptop on afad_synthetic" in message
    assert f"python train.py experiment={SOURCE} dataset=afad_synthetic trainer=laptop seed=0\n" in message
    assert "init_from=<run folder>, or init_from=null to start from weights that are not trained" in message


def test_none_that_fits_says_what_there_is(outputs: Path) -> None:
    write_run(outputs / "runs" / "a", scale="debug")
    write_run(outputs / "runs" / "b", seed=1)
    write_run(outputs / "runs" / "c", depth=20)
    with pytest.raises(ConfigError) as raised:
        start()
    for words in ("1 of scale debug", "1 of seed 1", "1 of another network"):
        assert words in str(raised.value)


def test_a_run_that_diverged_is_no_start(outputs: Path) -> None:
    write_run(outputs / "runs" / "a", state="diverged")
    with pytest.raises(ConfigError) as raised:
        start()
    message = str(raised.value)
    assert "diverged (outputs/runs/a): no training can start from it" in message
    assert f"experiment={SOURCE}" in message
    assert "init_from=null" in message


@pytest.mark.parametrize("state", ["running", "interrupted", "failed"])
def test_a_run_that_is_not_done_is_no_start(outputs: Path, state: str) -> None:
    write_run(outputs / "runs" / "a", state=state)
    with pytest.raises(ConfigError) as raised:
        start()
    assert f"is {state}" in str(raised.value)
    assert "python train.py resume=outputs/runs/a" in str(raised.value)
    assert "init_from=null" in str(raised.value)


def test_a_damaged_record_is_named_and_left_out(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(outputs / "runs" / "a")
    broken = write_run(outputs / "runs" / "b") / "run.json"
    broken.write_text("{")
    assert start() == "outputs/runs/a"
    assert f"left out: {broken} is damaged" in capsys.readouterr().err


def test_a_data_set_without_a_warm_start(outputs: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"warm_start\.dataset does not say.*warm_start\.dataset=<its name>"
    ):
        start(dataset=None)


def best(lam: float = 0.25, **given: str | None) -> float:
    config = asking(**given)
    config.init_from = None
    config.optimizer = {"lam": lam, "alpha": "${gramgn.best_alpha:lambda_alpha}"}
    found = plain(config)["optimizer"]["alpha"]
    assert isinstance(found, float)
    return found


def write_cell(grid: Path, lam: float, alpha: float, last: float, **other: Any) -> Path:
    state = other.pop("state", "diverged" if math.isnan(last) else "done")
    folder = grid / f"{lam}-{alpha}-{other.get('seed', 0)}"
    return write_run(
        folder,
        state=state,
        dataset=other.pop("dataset", "rsna_synthetic"),
        experiment="fig2/rsna_ggn_fixup",
        sweep="lambda_alpha",
        lam=lam,
        alpha=alpha,
        losses=() if math.isnan(last) else (5.0, last),
        **other,
    )


def test_the_best_alpha_of_a_lambda(outputs: Path) -> None:
    grid = outputs / "sweeps" / "grid"
    for lam, alpha, loss in (
        (0.25, 1, 0.5),
        (0.25, 3, 0.2),
        (0.25, 10, 0.4),
        (1, 0.1, 0.01),
        (0.25, 0.1, math.nan),
    ):
        write_cell(grid, lam, alpha, loss)
    assert best() == 3.0
    assert best(lam=1) == 0.1


def test_the_best_alpha_needs_a_grid_of_the_same_kind(outputs: Path) -> None:
    grid = outputs / "sweeps" / "grid"
    write_cell(grid, 0.25, 1, 0.1, scale="paper")
    write_cell(grid, 0.25, 3, 0.1, dataset="rsna")
    write_cell(grid, 1, 3, 0.1)
    with pytest.raises(ConfigError) as raised:
        best()
    assert "no run of sweep=lambda_alpha with lam=0.25 on rsna_synthetic at scale laptop" in str(raised.value)
    assert "python train.py sweep=lambda_alpha dataset=rsna_synthetic trainer=laptop" in str(raised.value)


def test_of_several_grids_one_must_be_named(outputs: Path) -> None:
    write_cell(outputs / "sweeps" / "first", 0.25, 1, 0.1)
    write_cell(outputs / "sweeps" / "second", 0.25, 3, 0.1)
    with pytest.raises(ConfigError, match=r"first, second.*best_alpha\.sweep="):
        best()
    assert best(grid="first") == 1.0
    assert best(grid="second") == 3.0


def test_an_unfinished_grid_has_no_best_alpha(outputs: Path) -> None:
    """Neither one with a cell that stopped, nor one with a cell that has not begun: the answer could change."""
    grid = outputs / "sweeps" / "grid"
    done = write_cell(grid, 0.25, 1, 0.1)
    assert best() == 1.0
    write_cell(grid, 1, 3, 0.1, state="interrupted")
    with pytest.raises(ConfigError, match=r"sweeps/grid is not finished \(1 of 2 jobs have no final loss\)"):
        best()
    cells = [{"folder": name} for name in (done.name, "1-3-0", "waiting")]
    SweepFolder(grid).write({"cells": cells})
    with pytest.raises(ConfigError, match="2 of 3 jobs"):
        best()


def test_a_column_that_diverged_has_no_best_alpha(outputs: Path) -> None:
    write_cell(outputs / "sweeps" / "grid", 0.25, 1, math.nan)
    with pytest.raises(
        ConfigError, match=r"every run with lam=0\.25 of the grid outputs/sweeps/grid diverged"
    ):
        best()


def test_a_finished_cell_without_its_last_epoch(outputs: Path) -> None:
    cell = write_cell(outputs / "sweeps" / "grid", 0.25, 1, 0.1)
    RunFolder(cell).truncate_metrics(1)
    with pytest.raises(ConfigError, match="1 of 1 jobs have no final loss"):
        best()
