"""The pure parts of sweeps: identity of jobs, options, what is shown, and the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gramgn.app._sweep._display import Display, Outcome, closing_table, duration
from gramgn.app._sweep._identity import config_hash, differing, identifying, override_key
from gramgn.app._sweep._options import Options, gpus_to_hand_out, num_cores, read_options
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gramgn.app._folders import job_dir, remember_sweep, sweep_dir
from gramgn.app._repository import set_repository
from gramgn.app._sweep._display import Display, Outcome, closing_table, duration
from gramgn.app._sweep._options import Options, gpus_to_hand_out, num_cores, read_options
from gramgn.errors import ConfigError, InputError
from gramgn.records import (
    RunFolder,
    SweepFolder,
    config_hash,
    count_states,
    differing,
    find_sweeps,
    identifying,
    override_key,
    varying,
)

CONFIG = {
    "seed": 0,
    "optimizer": {"lam": 1.0, "betas": [0.9, 0.99]},
    "trainer": {"epochs": 2, "device": "cpu"},
}


def test_what_changes_no_result_is_no_part_of_a_jobs_identity() -> None:
    other = {**CONFIG, "tracking": {"mode": "none"}, "name": "x", "resume": None}
    other["trainer"] = {"epochs": 2, "device": "cuda", "threads": 3}
    assert config_hash(other) == config_hash(CONFIG)
    assert config_hash({**CONFIG, "trainer": {"epochs": 3}}) != config_hash(CONFIG)
    assert identifying(["tracking=none", "+tracking.mode=none", "b=1", "a=2", "trainer.threads=2"]) == [
        "a=2",
        "b=1",
    ]


def test_differing_keys_are_named_with_both_values() -> None:
    other = {**CONFIG, "optimizer": {"lam": 2.0, "betas": [0.9, 0.99], "alpha": 3}}
    assert differing(CONFIG, other) == {"optimizer.alpha": (None, 3), "optimizer.lam": (1.0, 2.0)}
    assert differing(CONFIG, json.loads(json.dumps(CONFIG))) == {}


KEYS = st.text("abc", min_size=1, max_size=3)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)


# How long drawing an example takes on a busy machine is no fault of the hash.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_a_hash_survives_json_and_order(config: dict[str, object]) -> None:
    written = json.loads(json.dumps(dict(reversed(config.items()))))
    assert config_hash(written) == config_hash(config)
    assert differing(config, written) == {}


@pytest.mark.parametrize("override", ["a.b=1", "+a.b=1", "++a.b=1", "~a.b", "a/b=x"])
def test_the_key_of_an_override(override: str) -> None:
    assert override_key(override) == "a.b"


def test_folders_of_sweeps(tmp_path: Path) -> None:
    """DESIGN, folders: name=, the named sweep, or a hash of the sorted command line."""
    set_repository(tmp_path)
    leaf = {
        "given": Path(sweep_dir("my name/..", "seeds", ["seed=1"])).name,
        "named": Path(sweep_dir(None, "lambda_alpha", ["sweep=lambda_alpha", "tracking=none"])).name,
        "more": Path(sweep_dir(None, "lambda_alpha", ["sweep=lambda_alpha", "trainer=laptop"])).name,
        "adhoc": Path(sweep_dir(None, None, ["a=1", "b=2,3"])).name,
        "sorted": Path(sweep_dir(None, None, ["b=2,3", "a=1", "on_failure=stop"])).name,
    }
    assert leaf["given"] == "my_name"
    assert leaf["named"] == "lambda_alpha"
    assert leaf["more"].startswith("lambda_alpha-")
    assert leaf["adhoc"].startswith("adhoc-")
    assert leaf["adhoc"] == leaf["sorted"]


def test_a_job_keeps_its_folder(tmp_path: Path) -> None:
    """The hash identifies it, the readable part is that of the sweep that made it."""
    remember_sweep(tmp_path, ["a=1"])
    first = job_dir(["a=1", "b=2"])
    assert first.startswith("b=2-")
    (tmp_path / first).mkdir()
    remember_sweep(tmp_path, ["b=2"])
    assert job_dir(["b=2", "a=1", "tracking=none"]) == first
    assert job_dir(["b=2", "a=3"]).startswith("a=3-")
    remember_sweep(tmp_path / "nowhere", [])


def test_threads_are_shared_by_jobs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert read_options(1, None, None, "continue").threads is None
    assert read_options(2, None, None, "continue").threads == max(1, num_cores() // 2)
    assert read_options(2, 3, None, "continue").threads == 3
    assert read_options(-1, None, None, "stop").num_at_once == num_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert read_options(2, None, None, "continue").threads == 1


def test_gpus_are_handed_out_to_several_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_to_hand_out(Options(n_jobs=1), 4) == ()
    assert gpus_to_hand_out(Options(n_jobs=4), 2) == ("0", "1")
    assert gpus_to_hand_out(Options(n_jobs=4), 0) == ()
    assert gpus_to_hand_out(Options(n_jobs=1, gpus=("3",)), 4) == ("3",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert gpus_to_hand_out(Options(n_jobs=2), 2) == ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    "bad", [(0, None, None), (1.5, None, None), (True, None, None), (2, 0, None), (1, None, [])]
)
def test_bad_options(bad: tuple[object, object, object]) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\."):
        read_options(*bad, "continue")


def test_durations_and_table() -> None:
    assert [duration(seconds) for seconds in (0.25, 59.9, 61, 3661)] == ["0.2 s", "59.9 s", "1:01", "1:01:01"]
    rows = [
        ("seed=0", Outcome("done", val_loss=0.5, seconds=2.0)),
        ("seed=1", Outcome("failed", "why\nmore", seconds=1)),
        ("seed=2", Outcome("diverged", "the loss was not finite", kept=True)),
        ("seed=3", Outcome("waiting")),
    ]
    assert closing_table("outputs/sweeps/x", rows).splitlines() == [
        "",
        "4 jobs in outputs/sweeps/x: 1 done, 1 diverged, 1 failed, 1 waiting",
        "  done        seed=0     2.0 s  best val loss 0.5",
        "  failed      seed=1     1.0 s  why",
        "  diverged    seed=2      kept  the loss was not finite",
        "  waiting     seed=3",
    ]


def test_what_distinguishes_jobs() -> None:
    assert varying([["a=1", "b=1"], ["a=1", "b=2", "c=3"]]) == ["b=1", "b=2 c=3"]
    assert varying([["a=1"]]) == [""]
    assert varying([]) == []


def write_cell(sweep: Path, name: str, state: str, **more: object) -> None:
    run = RunFolder.create(sweep / name)
    run.write_run({"state": state, "config": {"trainer": {"epochs": 3}}, **more})


def test_the_states_of_a_sweep(tmp_path: Path) -> None:
    """A killed run, a CSV cut in mid-line, a NaN, a damaged record, a job that has not begun: all have a state."""
    sweep = SweepFolder(tmp_path / "sweep")
    sweep.path.mkdir()
    names = ["done", "nan", "killed", "damaged", "waiting", "early", "faulty"]
    cells = [{"folder": name, "overrides": [f"x={name}"], "state": "waiting"} for name in names]
    cells[-1] |= {"state": "failed", "error": "lam=0"}
    cells[-2] |= {"state": "running"}
    sweep.write({"cells": cells})
    write_cell(sweep.path, "done", "done", time={"wall_s": 5.0}, best={"val_loss": 0.5})
    write_cell(sweep.path, "nan", "diverged", error={"type": "Diverged", "message": "not finite"})
    RunFolder(sweep.path / "nan").append_metrics({"epoch": 1, "train_loss": float("nan"), "wall_s": 2.0})
    write_cell(sweep.path, "killed", "running")
    RunFolder(sweep.path / "killed").append_metrics({"epoch": 1, "train_loss": 0.25, "wall_s": 2.0})
    with (sweep.path / "killed" / "metrics.csv").open("a") as file:
        file.write("2,100,0.")
    (sweep.path / "damaged").mkdir()
    (sweep.path / "damaged" / "run.json").write_text("{")
    found = {cell.folder.name: cell for cell in sweep.cells()}
    states = {name: cell.state for name, cell in found.items()}
    assert states == {
        "done": "done",
        "nan": "diverged",
        "killed": "killed",
        "damaged": "failed",
        "waiting": "waiting",
        "early": "killed",
        "faulty": "failed",
    }
    assert (found["killed"].epoch, found["killed"].epochs, found["killed"].train_loss) == (1, 3, 0.25)
    assert found["done"].elapsed_s == 5.0
    assert found["faulty"].error == "lam=0"
    assert list(count_states(list(found.values()))) == ["waiting", "killed", "failed", "diverged", "done"]
    assert json.loads(json.dumps([cell.as_json() for cell in found.values()], allow_nan=False))
    assert [each.path for each in find_sweeps(tmp_path)] == [sweep.path]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1, "cells": 3}', '{"format": 9, "cells": []}']
)
def test_a_damaged_sweep_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(InputError, match=r"sweep\.json"):
        SweepFolder(tmp_path).cells()


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a sweep's folder"):
        SweepFolder(tmp_path).read()
    assert find_sweeps(tmp_path / "nowhere") == []


def test_a_table_on_a_terminal_stays_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Redrawn in place, no wider than the terminal, and gone at the end."""
    from gramgn.app._sweep._display import Running
    from gramgn.app._sweep._tasks import Cell

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    monkeypatch.setenv("TERM", "xterm")
    display = Display(4)
    display.expect({"waiting": 9}, [])
    jobs = [
        Running(Cell(tmp_path / str(slot), (), {}, {}, "s"), f"optimizer.lam=1 seed={slot}", slot)
        for slot in range(4)
    ]
    for job in jobs:
        display.started(job)
    display.tick(jobs, now=True)
    drawn = capsys.readouterr().err.splitlines()
    assert drawn[0].startswith("9 jobs: 4 running, 5 waiting")
    assert len(drawn) == 3
    assert all(len(line) < 40 for line in drawn)
    display.ended(jobs[0], Outcome("failed", "why", seconds=1.0))
    assert capsys.readouterr().err.startswith(
        "\x1b[3F\x1b[J[1/9] failed   optimizer.lam=1 seed=0  1.0 s, why (log:"
    )
