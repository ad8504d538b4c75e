"""Which finished runs are found again: renamed or copied grids, and jobs that have lost their records."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gramgn.app import plain, register_resolvers, set_repository
from gramgn.errors import ConfigError
from gramgn.records import RunFolder, SweepFolder, path_override

CONFIG: dict[str, Any] = {
    "seed": 0,
    "model": {"depth": 8},
    "dataset": {"name": "digits"},
    "optimizer": {"lam": 1.0, "alpha": 0.3, "damping_convention": "mean"},
    "trainer": {"epochs": 2, "scale": "debug"},
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Path:
    set_repository(tmp_path)
    register_resolvers()
    return tmp_path


def best(convention: str = "mean", grid: str | None = None) -> Any:
    """Return the alpha that a configuration takes from the finished grid."""
    optimizer = {"lam": 1.0, "alpha": "${gramgn.best_alpha:lambda_alpha}", "damping_convention": convention}
    return plain(OmegaConf.create({**CONFIG, "optimizer": optimizer, "best_alpha": {"sweep": grid}}))[
        "optimizer"
    ]["alpha"]


def write(folder: Path, state: str = "done", alpha: float = 0.3, epochs: int = 2) -> Path:
    config = {**CONFIG, "optimizer": {**CONFIG["optimizer"], "alpha": alpha}}
    run = RunFolder.create(folder)
    content = {"state": state, "config": config, "choices": {"sweep": "lambda_alpha"}, "group": "grid"}
    run.write_run(content | {"starts": [{"time_utc": "2026-01-01T00:00:00Z"}]})
    for epoch in range(1, epochs + 1):
        run.append_metrics({"epoch": epoch, "train_loss": alpha})
    return folder


def test_a_done_job_without_records_has_to_be_done_again(root: Path) -> None:
    """Nobody may count on it: not the status, not the chain, not the choice of alpha."""
    jobs = [{"folder": name, "overrides": [f"a={name}"], "state": "done"} for name in ("here", "gone")]
    sweep = SweepFolder(root / "outputs" / "sweeps" / "grid")
    write(sweep.path / "here")
    sweep.write({"cells": jobs})
    assert [cell.state for cell in sweep.cells()] == ["done", "waiting"]
    assert sweep.cells()[1].error == "it was done, and its run.json is gone"
    with pytest.raises(ConfigError, match="1 of 2 jobs have no final loss"):
        best()


def test_a_grid_is_known_by_its_folder(root: Path) -> None:
    """A renamed or copied sweep is asked for by the name that it has now."""
    for name, alpha in (("first", 1.0), ("copy", 3.0)):
        write(root / "outputs" / "sweeps" / name / "cell", alpha=alpha)
    with pytest.raises(ConfigError, match=r"several grids.*copy, first"):
        best()
    assert (best(grid="first"), best(grid="copy")) == (1.0, 3.0)


def test_an_alpha_of_the_other_convention_is_never_taken(root: Path) -> None:
    """The sum's alpha is b times the mean's: it would be wrong by the batch size without a word."""
    write(root / "outputs" / "sweeps" / "grid" / "cell")
    assert best() == 0.3
    with pytest.raises(ConfigError, match="there are 1 of damping_convention mean"):
        best(convention="sum")


def test_a_folder_of_a_job_can_be_pasted(root: Path) -> None:
    """Job folders hold ``=`` and commas, which Hydra takes only in quotes, and a shell keeps only in more of them."""
    folder = write(root / "outputs" / "sweeps" / "s" / "alpha=1,seed=0-0123abcd", "interrupted")
    content = json.loads((folder / "run.json").read_text())
    RunFolder(folder).write_run(content | {"choices": {"experiment": "e"}})
    with pytest.raises(ConfigError) as raised:
        plain(
            OmegaConf.create(
                {**CONFIG, "init_from": "${gramgn.trained:e}", "warm_start": {"dataset": "digits"}}
            )
        )
    line = next(line for line in str(raised.value).splitlines() if "train.py resume" in line.replace('"', ""))
    words = shlex.split(line)
    assert words[:2] == ["python", "train.py"]
    override = OverridesParser.create().parse_override(words[2])
    assert (override.get_key_element(), override.value()) == (
        "resume",
        "outputs/sweeps/s/alpha=1,seed=0-0123abcd",
    )
    assert path_override("resume", "outputs/runs/20260101-0-abc") == "resume=outputs/runs/20260101-0-abc"
