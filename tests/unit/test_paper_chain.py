"""The paper's chain: its sweeps, what each starts from, what a failure or a stop does to the rest."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gramgn.app
from gramgn.records import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/paper.py, looking for its sweeps in an empty folder."""
    spec = importlib.util.spec_from_file_location("paper", REPOSITORY / "scripts" / "paper.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["paper.py"])
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SWEEPS", tmp_path)
    return module


class Trainer:
    """Stands in for the whole of `train.py`: leaves the records that it would leave, and an exit code.

    Attributes:
        states: State by sweep and seed; `"done"` where nothing is given.
        codes: Exit code by sweep; 0 where nothing is given.
        seeds: The seeds of every call, by sweep.
    """

    def __init__(self, sweeps: Path) -> None:
        self.sweeps = sweeps
        self.states: dict[tuple[str, int], str] = {}
        self.codes: dict[str, int] = {}
        self.seeds: dict[str, list[int]] = {}

    def __call__(self, words: list[str], root: Path) -> int:
        given = dict(word.split("=", 1) for word in words if "=" in word)
        name = given["name"].rpartition("-")[2]
        self.seeds[name] = [int(seed) for seed in given["seed"].split(",")]
        for seed in self.seeds[name]:
            folder = self.sweeps / given["name"] / f"seed-{seed}"
            if not folder.exists():
                state = self.states.get((name, seed), "done")
                RunFolder.create(folder).write_run({"state": state, "seed": seed})
        return self.codes.get(name, 0)


@pytest.fixture
def trainer(paper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer(paper.SWEEPS)
    monkeypatch.setattr(paper, "train_command", trainer)
    return trainer


def test_the_sweeps_are_the_papers(paper: ModuleType) -> None:
    """Six curves, our two and 2c with three seeds, 2b with one; every panel has its sweep, after what it needs."""
    assert {panel for panels, *_ in paper.STEPS.values() for panel in panels.split()} == {
        "1a",
        "1b",
        "1c",
        "1d",
        "2a",
        "2b",
        "2c",
    }
    names = list(paper.STEPS)
    for number, (_, _, _, start) in enumerate(paper.STEPS.values()):
        assert start is None or start in names[:number]
    assert names.index(paper.GRID) < names.index(paper.CURVES)
    cells = {paper.GRID: 5 * 8, paper.CURVES: 5}
    for scale, jobs in (("debug", 69), ("laptop", 149), ("paper", 69)):
        assert sum(len(paper.planned_seeds(name, scale)) * cells.get(name, 1) for name in names) == jobs


def test_command_lines(paper: ModuleType) -> None:
    def words(name: str, scale: str = "laptop", data: str = "synthetic") -> str:
        return " ".join(paper.command(name, scale, data, paper.planned_seeds(name, scale)))

    assert words("afad_sgd_bn") == (
        "-m experiment=fig1/afad_sgd_bn dataset=afad_synthetic trainer=laptop trainer.epochs=20 seed=0,1,2 "
        "name=paper-laptop-synthetic-afad_sgd_bn"
    )
    assert words(paper.GRID) == (
        "-m sweep=lambda_alpha dataset=rsna_synthetic trainer=laptop trainer.epochs=10 seed=0,1,2 "
        "dataset.limit=512 warm_start.sweep=paper-laptop-synthetic-afad_ggn_fixup "
        "name=paper-laptop-synthetic-lambda_alpha"
    )
    assert words(paper.CURVES) == (
        "-m sweep=lambda_alpha_curves dataset=rsna_synthetic trainer=laptop trainer.epochs=20 seed=0 "
        "warm_start.sweep=paper-laptop-synthetic-afad_ggn_fixup "
        "best_alpha.sweep=paper-laptop-synthetic-lambda_alpha name=paper-laptop-synthetic-lambda_alpha_curves"
    )
    assert words("rsna_sgd_bn", "paper", "real") == (
        "-m experiment=fig1/rsna_sgd_bn dataset=rsna trainer=paper trainer.epochs=30 seed=0,1,2 "
        "warm_start.sweep=paper-paper-real-afad_sgd_bn name=paper-paper-real-rsna_sgd_bn"
    )
    assert "dataset.limit" not in words(paper.GRID, "paper")
    assert all("dataset.num_images=full" in words(name, "paper") for name in paper.STEPS)


@pytest.mark.parametrize(
    ("scale", "data"), [("debug", "synthetic"), ("laptop", "synthetic"), ("paper", "real")]
)
def test_every_command_line_composes(paper: ModuleType, scale: str, data: str) -> None:
    gramgn.app.set_repository(REPOSITORY)
    gramgn.app.register_resolvers()
    for name, (_, _, dataset, start) in paper.STEPS.items():
        config = gramgn.app.compose_config(paper.command(name, scale, data, [1])[1:])
        assert config.seed == 1
        assert config.trainer.scale == scale
        assert config.dataset.name == dataset + ("" if data == "real" else "_synthetic")
        assert config.warm_start.dataset == (None if start is None else "afad")
        assert config.warm_start.sweep == (None if start is None else f"paper-{scale}-{data}-{start}")


def test_a_whole_chain(paper: ModuleType, trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["tracking=none"]) == 0
    assert list(trainer.seeds) == list(paper.STEPS)
    said = capsys.readouterr().err
    assert "[6/10] rsna_sgd_bn (figures 1c 1d 2a)" in said
    assert re.search(r"python train\.py -m experiment=fig1/rsna_sgd_bn .* tracking=none\n", said)
    assert said.rstrip().endswith("draw the figures with: make figures\nwrite the report with: make report")
    assert paper.main(["--list"]) == 0
    assert "rsna_sgd_bn (figures 1c 1d 2a): not begun\n  python train.py -m" in capsys.readouterr().out


def test_a_failed_sweep_affects_only_what_starts_from_it(
    paper: ModuleType, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does anything start from a network that diverged; the same command then does what is missing."""
    trainer.codes["afad_sgd_bn"] = 1
    trainer.states |= {("afad_sgd_bn", seed): "failed" for seed in range(3)}
    trainer.states["afad_ggn_spring_gn", 1] = "diverged"
    assert paper.main([]) == 1
    assert "rsna_sgd_bn" not in trainer.seeds
    assert trainer.seeds["rsna_ggn_spring_gn"] == [0, 2]
    assert trainer.seeds[paper.CURVES] == [0]
    said = capsys.readouterr().err
    assert "without seed 0, 1, 2: afad_sgd_bn has no finished network of that seed" in said
    assert "the same command tries them again" in said
    trainer.codes.clear()
    for run in paper.SWEEPS.glob("*/*"):
        RunFolder(run).update_run(state="done")
    assert paper.main([]) == 0
    assert trainer.seeds["rsna_sgd_bn"] == trainer.seeds["rsna_ggn_spring_gn"] == [0, 1, 2]


@pytest.mark.parametrize("code", [2, 130, 143])
def test_bad_input_or_a_stop_ends_the_chain(paper: ModuleType, trainer: Trainer, code: int) -> None:
    """H16: not a message from each of ten sweeps."""
    trainer.codes["afad_sgd_bn"] = code
    assert paper.main([]) == code
    assert list(trainer.seeds) == list(paper.STEPS)[:2]


def test_the_scale_and_the_data_are_choices(paper: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paper.main(["--scale", "huge"])
    assert "invalid choice: 'huge'" in capsys.readouterr().err
