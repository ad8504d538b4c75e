"""The paper's chain: its steps, what each starts from, what an interruption or a failure does to the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gramgn.app import compose_config, set_repository
from gramgn.app._folders import register_resolvers
from gramgn.app._paper import CURVES, GRID, NUM_ALPHAS, NUM_CURVES, NUM_LAMBDAS, SCALES, Chain, Step
from gramgn.app._paper_run import check_overrides, list_chain, missing_data, run_chain
from gramgn.app._paper_state import duration, estimate_s, headline, progress
from gramgn.errors import ConfigError, DataError, InputError
from gramgn.records import RunFolder, SweepFolder
from gramgn.stopping import StopRequested

REPOSITORY = Path(__file__).resolve().parents[2]
LAPTOP = Chain(SCALES["laptop"], "synthetic")
NAMES = [step.name for step in LAPTOP.steps]


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Path:
    """Return a repository with our conf/ and without outputs."""
    (tmp_path / "conf").symlink_to(REPOSITORY / "conf")
    set_repository(tmp_path)
    register_resolvers()
    return tmp_path


class Trainer:
    """Stands in for ``train.py``: leaves the records that it would leave, and an exit code.

    Attributes:
        states: State by step name and seed; ``"done"`` where nothing is said.
        codes: Exit code by step name; 0 where nothing is said.
        called: The step names in the order of the calls.
        arguments: The command lines.
    """

    def __init__(self, root: Path) -> None:
        self.sweeps = root / "outputs" / "sweeps"
        self.states: dict[tuple[str, int], str] = {}
        self.codes: dict[str, int] = {}
        self.called: list[str] = []
        self.arguments: dict[str, Sequence[str]] = {}

    def __call__(self, arguments: Sequence[str]) -> int:
        given = dict(word.split("=", 1) for word in arguments if "=" in word)
        step = given["name"].removeprefix(LAPTOP.name + "-")
        self.called.append(step)
        self.arguments[step] = arguments
        cells = {GRID: NUM_LAMBDAS * NUM_ALPHAS, CURVES: NUM_CURVES}.get(step, 1)
        for seed in map(int, re.findall(r"\d+", given["seed"])):
            for cell in range(cells):
                folder = self.sweeps / given["name"] / f"seed={seed}-{cell}"
                if not folder.exists():
                    state = self.states.get((step, seed), "done")
                    RunFolder.create(folder).write_run(
                        {"state": state, "seed": seed, "time": {"wall_s": 5.0}}
                    )
        return self.codes.get(step, 0)


@pytest.fixture
def trainer(root: Path) -> Trainer:
    return Trainer(root)


def step_of(name: str) -> Step:
    return next(step for step in LAPTOP.steps if step.name == name)


def words(chain: Chain, name: str) -> str:
    step = next(step for step in chain.steps if step.name == name)
    return " ".join(chain.arguments(step, step.seeds))


def test_the_steps_are_the_papers() -> None:
    """Six curves, our two and 2c with three seeds, 2b with one; every panel has its step."""
    assert {step.name: len(step.seeds) * step.cells for step in LAPTOP.steps} == {
        **{
            f"{data}_{curve}": 3
            for data in ("afad", "rsna")
            for curve in ("ggn_fixup", "sgd_bn", "sgd_fixup")
        },
        "afad_ggn_spring_gn": 3,
        "rsna_ggn_spring_gn": 3,
        GRID: 120,
        CURVES: 5,
    }
    assert set(" ".join(step.figures for step in LAPTOP.steps).split()) == {
        "1a",
        "1b",
        "1c",
        "1d",
        "2a",
        "2b",
        "2c",
    }
    assert all(
        step.choice.split("=")[1].startswith("ours/") == step.name.endswith("gn") for step in LAPTOP.steps[:8]
    )


def test_what_a_step_needs_comes_before_it() -> None:
    for number, step in enumerate(LAPTOP.steps):
        for need in (step.warm_start, step.grid):
            assert need is None or need in NAMES[:number]


def test_command_lines() -> None:
    assert words(LAPTOP, "afad_sgd_bn") == (
        "-m experiment=fig1/afad_sgd_bn dataset=afad_synthetic trainer=laptop trainer.epochs=20 seed=0,1,2 "
        "name=paper-laptop-synthetic-afad_sgd_bn"
    )
    assert words(LAPTOP, "rsna_sgd_fixup") == (
        "-m experiment=fig1/rsna_sgd_fixup dataset=rsna_synthetic trainer=laptop trainer.epochs=20 seed=0,1,2 "
        "warm_start.sweep=paper-laptop-synthetic-afad_ggn_fixup name=paper-laptop-synthetic-rsna_sgd_fixup"
    )
    assert words(LAPTOP, GRID) == (
        "-m sweep=lambda_alpha dataset=rsna_synthetic trainer=laptop trainer.epochs=10 seed=0,1,2 "
        "dataset.limit=512 "
        "warm_start.sweep=paper-laptop-synthetic-afad_ggn_fixup name=paper-laptop-synthetic-lambda_alpha"
    )
    assert words(LAPTOP, CURVES) == (
        "-m sweep=lambda_alpha_curves dataset=rsna_synthetic trainer=laptop trainer.epochs=20 seed=0 "
        "warm_start.sweep=paper-laptop-synthetic-afad_ggn_fixup "
        "best_alpha.sweep=paper-laptop-synthetic-lambda_alpha name=paper-laptop-synthetic-lambda_alpha_curves"
    )
    alone = LAPTOP.arguments(step_of("afad_sgd_bn"), [2])
    assert "seed=choice(2)" in alone  # swept, as in the whole command: the job keeps its folder
    real = Chain(SCALES["paper"], "real", ("tracking=none",))
    assert words(real, "rsna_sgd_bn") == (
        "-m experiment=fig1/rsna_sgd_bn dataset=rsna trainer=paper trainer.epochs=30 seed=0,1,2 "
        "warm_start.sweep=paper-paper-real-afad_sgd_bn name=paper-paper-real-rsna_sgd_bn tracking=none"
    )
    assert "dataset.limit" not in words(real, GRID)
    full = Chain(SCALES["paper"], "synthetic")
    assert all("dataset.num_images=full" in words(full, step.name) for step in full.steps)


@pytest.mark.parametrize("data", ["synthetic", "real"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_line_composes(name: str, scale: str, data: str) -> None:
    chain = Chain(SCALES[scale], data)
    step = next(step for step in chain.steps if step.name == name)
    arguments = chain.arguments(step, [1])[1:]
    config = compose_config(["seed=1" if word.startswith("seed=") else word for word in arguments])
    assert config.seed == 1
    assert config.trainer.scale == scale
    assert config.trainer.epochs == chain.epochs(step)
    assert config.dataset.name == chain.dataset(step)
    if step.warm_start is not None:
        assert config.warm_start.dataset == step_of(step.warm_start).dataset
        assert config.warm_start.sweep == chain.folder_name(step.warm_start)


def test_the_laptop_chain_takes_less_than_two_hours() -> None:
    states = [progress(LAPTOP, step, Path("nowhere")) for step in LAPTOP.steps]
    assert 1200 < sum(estimate_s(LAPTOP, states).values()) < 7200
    assert "10 steps, 149 jobs, 0 done; about " in headline(LAPTOP, states)


def test_the_time_left_follows_the_time_taken(root: Path, trainer: Trainer) -> None:
    step = step_of("afad_ggn_fixup")
    before = [progress(LAPTOP, each, trainer.sweeps) for each in LAPTOP.steps]
    trainer(LAPTOP.arguments(step, step.seeds))  # 5 s a job instead of more than a minute
    after = [progress(LAPTOP, each, trainer.sweeps) for each in LAPTOP.steps]
    was, now = estimate_s(LAPTOP, before), estimate_s(LAPTOP, after)
    assert now["afad_ggn_fixup"] == 0
    assert now["rsna_ggn_fixup"] < was["rsna_ggn_fixup"] / 3


def test_a_whole_chain(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chain(LAPTOP, trainer) == 0
    assert trainer.called == NAMES
    said = capsys.readouterr().err
    assert said.index("149 jobs, 0 done; about") < said.index("[1/10] afad_ggn_fixup (figures 1a 1b)")
    assert "python train.py -m experiment=fig1/rsna_sgd_bn dataset=rsna_synthetic" in said
    assert "149 jobs, 149 done" in list_chain(LAPTOP)
    assert said.rstrip().endswith("draw the figures with: make figures\nwrite the report with: make report")


def test_a_failed_step_stops_only_what_needs_it(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.codes["afad_sgd_bn"] = 1
    trainer.states |= {("afad_sgd_bn", seed): "failed" for seed in range(3)}
    trainer.codes[GRID] = -9
    assert run_chain(LAPTOP, trainer) == 1
    assert trainer.called == [name for name in NAMES if name not in ("rsna_sgd_bn", CURVES)]
    said = capsys.readouterr().err
    assert "afad_sgd_bn: train.py ended with exit code 1" in said
    assert (
        "rsna_sgd_bn: left out: it starts from afad_sgd_bn; it has no finished run of seeds 0, 1, 2" in said
    )
    assert "lambda_alpha: train.py was killed by SIGKILL" in said
    assert "lambda_alpha_curves: left out, it needs lambda_alpha, which is not complete" in said
    assert "give the same command" in said


def test_the_same_command_goes_on(trainer: Trainer) -> None:
    trainer.codes["afad_sgd_bn"] = 1
    trainer.states[("afad_sgd_bn", 2)] = "failed"
    assert run_chain(LAPTOP, trainer) == 1
    assert "seed=0,1" in trainer.arguments["rsna_sgd_bn"]
    first = {path: path.stat().st_mtime_ns for path in trainer.sweeps.rglob("run.json")}
    trainer.codes.clear()
    RunFolder(trainer.sweeps / LAPTOP.folder_name("afad_sgd_bn") / "seed=2-0").update_run(state="done")
    trainer.called.clear()
    assert run_chain(LAPTOP, trainer) == 0
    assert trainer.called == NAMES  # train.py itself compares and keeps what is done
    assert "seed=0,1,2" in trainer.arguments["rsna_sgd_bn"]
    changed = [path for path, time in first.items() if path.stat().st_mtime_ns != time]
    assert [path.parent.name for path in changed] == ["seed=2-0"]


def test_nothing_starts_from_a_run_that_diverged(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One seed that diverged is an outcome and its jobs are no longer awaited; all of them leave a step out."""
    trainer.states[("afad_ggn_spring_gn", 1)] = "diverged"
    assert run_chain(LAPTOP, trainer) == 0
    assert "seed=0,2" in trainer.arguments["rsna_ggn_spring_gn"]
    said = capsys.readouterr().err
    assert "only seeds 0, 2: it starts from afad_ggn_spring_gn; its run of seed 1 diverged" in said
    assert "148 jobs, 148 done" in list_chain(LAPTOP)


def test_a_step_whose_every_start_diverged(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.states |= {("afad_ggn_fixup", seed): "diverged" for seed in range(3)}
    assert run_chain(LAPTOP, trainer) == 1
    assert not {"rsna_ggn_fixup", "rsna_sgd_fixup", GRID, CURVES} & set(trainer.called)
    said = capsys.readouterr().err
    assert (
        "lambda_alpha: left out: it starts from afad_ggn_fixup; its runs of seeds 0, 1, 2 diverged: nothing"
        in said
    )
    assert "what it starts from diverged" in list_chain(LAPTOP)


@pytest.mark.parametrize("code", [130, 143])
def test_a_stopped_train_py_stops_the_chain(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    trainer.codes["afad_sgd_bn"] = code
    with pytest.raises(StopRequested) as raised:
        run_chain(LAPTOP, trainer)
    assert raised.value.exit_code == code
    assert trainer.called == NAMES[:2]
    assert "the same command goes on where the chain stopped" in capsys.readouterr().err


def test_the_list_is_from_the_records(trainer: Trainer) -> None:
    assert list_chain(LAPTOP).count("not begun") == 10
    trainer.states |= {
        ("afad_sgd_bn", 0): "diverged",
        ("afad_sgd_bn", 1): "failed",
        ("afad_sgd_bn", 2): "running",
    }
    trainer.states[("afad_sgd_fixup", 2)] = "diverged"
    for name in ("afad_sgd_bn", "afad_sgd_fixup"):
        trainer(LAPTOP.arguments(step_of(name), (0, 1, 2)))
    lines = {line.split()[0]: line for line in list_chain(LAPTOP).splitlines()}
    assert "1 of 3 done, 1 diverged, 1 failed, 1 begun" in lines["afad_sgd_bn"]
    assert lines["afad_sgd_fixup"].split(maxsplit=4)[4].startswith("done, 1 diverged")
    assert lines["afad_sgd_fixup"].endswith("-")
    assert all(len(lines[name]) < 100 for name in NAMES)


def test_jobs_that_have_not_begun_or_failed_before_they_did(trainer: Trainer) -> None:
    """The sweep's own list counts: a run.json is there only once a job got as far as its data."""
    folder = trainer.sweeps / LAPTOP.folder_name("afad_sgd_bn")
    RunFolder.create(folder / "seed=0-0").write_run({"state": "done", "seed": 0})
    cells = [{"folder": "seed=0-0"}, {"folder": "seed=1-0", "state": "failed"}, {"folder": "seed=2-0"}]
    SweepFolder(folder).write({"cells": cells})
    assert "1 of 3 done, 1 failed" in list_chain(LAPTOP)
    SweepFolder(folder).sweep_json.write_text("{")
    assert "1 of 3 done  " in list_chain(LAPTOP)


def test_a_damaged_record_does_not_stop_the_list(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(LAPTOP.arguments(step_of("afad_sgd_bn"), (0, 1, 2)))
    file = next(trainer.sweeps.rglob("run.json"))
    file.write_text(json.dumps([]))
    assert "2 of 3 done" in list_chain(LAPTOP)
    assert f"left out: {file}" in capsys.readouterr().err


def test_raw_data_that_is_not_there(root: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    """With neither set one message for both, before anything else; with one of them, its steps are run."""
    real = Chain(SCALES["laptop"], "real")
    with pytest.raises(DataError) as raised:
        run_chain(real, trainer)
    for text in ("dataset afad: no usable raw data", "dataset rsna: no usable raw data", "--data synthetic"):
        assert text in str(raised.value)
    assert trainer.called == []
    faces = root / "data" / "raw" / "afad" / "AFAD-Lite" / "20" / "111"
    faces.mkdir(parents=True)
    (faces / "1-0.jpg").write_bytes(b"not read here")
    assert set(missing_data(real)) == {"rsna"}
    assert run_chain(real, trainer) == 1
    assert all(name.split("-")[-1].startswith("afad") for name in trainer.called)
    assert len(trainer.called) == 4
    assert "rsna_sgd_bn: left out, dataset=rsna cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    ["seed=3", "name=x", "+trainer.epochs=1", "dataset=afad", "init_from=x", "scale.limit=9", "word"],
)
def test_an_override_that_the_chain_makes_itself(override: str) -> None:
    with pytest.raises(ConfigError, match=override.lstrip("+").split("=")[0]):
        check_overrides(["tracking=none", override])


@pytest.mark.parametrize("override", ["+x.y=1", "tracking.mode=perhaps"])
def test_a_wrong_override_is_said_once_before_the_first_step(trainer: Trainer, override: str) -> None:
    """H16: not by each of ten steps in turn."""
    with pytest.raises(ConfigError, match=r"there is no 'x'|perhaps"):
        run_chain(Chain(SCALES["laptop"], "synthetic", (override,)), trainer)
    assert trainer.called == []


def test_overrides_reach_every_step(trainer: Trainer) -> None:
    extra = ("tracking=none", "trainer.device=cpu")
    check_overrides(extra)
    assert run_chain(Chain(SCALES["laptop"], "synthetic", extra), trainer) == 0
    assert all(tuple(arguments[-2:]) == extra for arguments in trainer.arguments.values())


def test_two_of_the_same_chain_at_once(trainer: Trainer) -> None:
    def again(arguments: Sequence[str]) -> int:
        with pytest.raises(InputError, match="is running already, as process"):
            run_chain(LAPTOP, trainer)
        seen.append(arguments)
        return trainer(arguments)

    seen: list[Any] = []
    assert run_chain(LAPTOP, again) == 0
    assert len(seen) == 10


def test_durations() -> None:
    assert [duration(seconds) for seconds in (4, 300, 7200, 300000)] == ["4 s", "5 min", "2.0 h", "3.5 days"]
