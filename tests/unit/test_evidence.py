"""The evidence: its runs are those of the protocol, chosen on validation; what a results file has is not repeated."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gramgn.app
from gramgn.records import RunFolder, runs

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/evidence.py with empty folders of sweeps and results."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("evidence", REPOSITORY / "scripts" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("SWEEPS", "RESULTS"):
        monkeypatch.setattr(module, name, tmp_path / name)
        (tmp_path / name).mkdir()
    return module


class Trainer:
    """Stands in for `train.py`: leaves the records of every job, with a validation loss that `loss` returns."""

    def __init__(self, evidence: ModuleType) -> None:
        self.evidence = evidence
        self.jobs: list[list[str]] = []

    def loss(self, words: list[str]) -> float:
        own = 0.5 if "optimizer=ggn_spring" in words else 1.0
        return own + 0.1 * ("schedule=cosine" not in words) + 0.2 * ("model=resnet_gn" in words)

    def __call__(self, words: list[str], root: Path) -> int:
        common = [word for word in words[1:] if not word.startswith(("hydra.", "name=", "tracking="))]
        (sweep,) = (word.removeprefix("name=") for word in words if word.startswith("name="))
        assert "trainer.threads=1" in common
        common.remove("trainer.threads=1")
        for point in re.findall(r"'([^']*)'", words[-1]):
            job = [*common, *point.split()]
            self.jobs.append([sweep, *job])
            folder = self.evidence.SWEEPS / sweep / gramgn.app.job_name([*job, "tracking=none"], (), {})
            run = RunFolder.create(folder)
            run.write_run({"state": "done", "config": {"trainer": {"epochs": 1}}})
            run.append_metrics({"epoch": 1, "val_loss": self.loss(job), "test_loss": 0.123, "train_s": 2.0})
        return 0


@pytest.fixture
def trainer(evidence: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Return the trainer; one data set stands for all, for speed."""
    trainer = Trainer(evidence)
    blocks = {block: (("rsna_synthetic",), *others) for block, (_, *others) in evidence.BLOCKS.items()}
    monkeypatch.setattr(evidence, "BLOCKS", blocks)
    monkeypatch.setattr(evidence, "train_command", trainer)
    return trainer


def test_the_whole_plan(evidence: ModuleType, trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block has the number of runs that it states, and choices follow validation losses."""
    assert evidence.main([]) == 0
    assert len({tuple(job) for job in trainer.jobs}) == len(trainer.jobs)
    for block, (_, _, count) in evidence.BLOCKS.items():
        assert len(evidence.results(block)) == (count or len(evidence.planned("clock", "rsna_synthetic")))
    final = [job for job in trainer.jobs if "final" in job[0] and "seed=4" in job]
    thirds = [job for job in final if "trainer.epochs=6" in job]
    assert [job[3:6] for job in thirds] == [
        ["optimizer=sgd", "model=resnet_bn", "schedule=cosine"],
        ["optimizer=ggn_spring", "model=resnet_gn", "schedule=linear"],
        ["optimizer=ggn_recommended", "model=resnet_gn", "schedule=one_cycle"],
    ]
    capsys.readouterr()


def test_the_protocol_states_the_number_of_runs(evidence: ModuleType) -> None:
    text = (REPOSITORY / "docs" / "protocol.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| [\d.]+ \|$", text, re.MULTILINE))
    blocks = evidence.BLOCKS.items()
    runs_of = {block: len(datasets) * count for block, (datasets, _, count) in blocks if count}
    assert {block: int(count) for block, count in table.items()} == runs_of
    assert f"| all | | | {sum(runs_of.values())} |" in text


def test_nothing_is_repeated_and_tuning_sees_no_test_losses(evidence: ModuleType, trainer: Trainer) -> None:
    """The results file is enough, also on a machine that has none of the runs."""
    assert evidence.main(["--block", "tune"]) == 0
    first, path = len(trainer.jobs), evidence.RESULTS / "evidence_tune.csv"
    table = runs(path)
    assert table.test_loss.isna().all()
    assert table.val_loss.notna().all()
    evidence.SWEEPS.rename(evidence.SWEEPS.with_name("elsewhere"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-5]))
    assert evidence.main(["--block", "tune"]) == 0
    assert len(trainer.jobs) == first + 5
    assert sorted(path.read_text().splitlines()) == sorted("".join(lines).splitlines())


def test_a_block_needs_those_before_it(
    evidence: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evidence.main(["--block", "final"]) == 2
    assert "run the blocks tune and refine first" in capsys.readouterr().err
    monkeypatch.setitem(evidence.BLOCKS, "desk", (("rsna_synthetic",), "desk", 21))
    assert evidence.main(["--block", "desk", "--dataset", "rotation"]) == 2
    assert "no runs on rotation; its data sets: rsna_synthetic" in capsys.readouterr().err
    assert evidence.main(["--list"]) == 0
    assert "tune: laptop scale, 340 runs, 0 done" in capsys.readouterr().out
    assert evidence.main(["--commands", "--block", "tune"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 340
    assert all(command.startswith("python train.py dataset=") for command in commands)


@pytest.mark.parametrize("code", [2, 130])
def test_a_stop_ends_all_blocks(evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(evidence, "train_command", lambda words, root: calls.append(words) or code)
    assert evidence.main([]) == code
    assert len(calls) == 1


def test_every_trial_composes(evidence: ModuleType) -> None:
    gramgn.app.set_repository(REPOSITORY)
    gramgn.app.register_resolvers()
    for words in (*(trials[-1] for trials in evidence.METHODS.values()), *evidence.PAPER, evidence.RECIPE):
        config = gramgn.app.compose_config(evidence.job("afad_synthetic", "desk", words, 6, 3))
        assert (config.trainer.epochs, config.trainer.scale, config.seed) == (6, "desk", 3)
