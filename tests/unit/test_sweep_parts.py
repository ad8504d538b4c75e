"""The pure parts of sweeps: options, folders, what is to be done about a job, what is shown, states from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gramgn.app import Job, check_place, job_name, set_repository, sweep_dir
from gramgn.errors import ConfigError, InputError
from gramgn.records import RunFolder, SweepFolder, count_states, varying
from gramgn.sweep import Cell, Display, Options, Outcome, closing_table, num_cores, read_options, review

CONFIG: dict[str, Any] = {
    "seed": 0,
    "dataset": {"name": "digits"},
    "optimizer": {"lam": 1.0, "alpha": 0.3},
    "trainer": {"epochs": 2},
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Path:
    set_repository(tmp_path)
    return tmp_path


def write(folder: Path, state: str = "done", epochs: int = 2, config: Any = CONFIG, **more: Any) -> Path:
    run = RunFolder.create(folder)
    run.write_run({"state": state, "config": config, **more})
    for epoch in range(1, epochs + 1):
        run.append_metrics({"epoch": epoch, "train_loss": 0.5, "wall_s": 2.0 * epoch})
    return folder


def reviewed(folder: Path) -> tuple[str, str]:
    cell = review(Cell(Job(CONFIG, {}, ["seed=0"], folder), {}))
    return cell.action, cell.reason


def test_a_finished_job_is_kept_only_with_its_epochs(root: Path) -> None:
    """F01: a metrics file that lost rows after the job was done is reported, not kept as a result."""
    assert reviewed(write(root / "whole")) == ("keep", "")
    for name, epochs in (("cut", 1), ("empty", 0)):
        action, reason = reviewed(write(root / name, epochs=epochs))
        assert action == "reject"
        assert f"ends at epoch {epochs} of 2. Put the file back, or move the job's folder away" in reason
    (write(root / "foreign") / "metrics.csv").write_bytes(b"a,b\n1,2\n3,4\n")
    action, reason = reviewed(root / "foreign")
    assert action == "reject"
    assert "Put the file back" in reason
    assert reviewed(write(root / "diverged", "diverged", epochs=1))[0] == "keep"


def test_a_job_whose_run_json_is_lost_or_damaged(root: Path) -> None:
    """H08: its other records are not overwritten, and the advice can be followed."""
    folder = write(root / "job")
    (folder / "run.json").write_text("")
    action, reason = reviewed(folder)
    assert (action, reason.count("is damaged")) == ("reject", 1)
    assert "Put the file back" in reason
    (folder / "run.json").unlink()
    action, reason = reviewed(folder)
    assert action == "reject"
    assert "run.json is gone, while metrics.csv is there. Put the file back" in reason
    assert reviewed(root / "nothing there")[0] == "new"


def test_jobs_that_are_not_finished(root: Path) -> None:
    """Interrupted and killed jobs are resumed; a changed configuration is not, unless nothing would be lost."""
    other = {**CONFIG, "optimizer": {"lam": 7.0, "alpha": 0.3}}
    assert reviewed(write(root / "killed", "running", epochs=1))[0] == "resume"
    assert reviewed(write(root / "interrupted", "interrupted", epochs=1))[0] == "resume"
    assert reviewed(write(root / "failed early", "failed", epochs=0, config=other))[0] == "restart"
    action, reason = reviewed(write(root / "other", "failed", epochs=1, config=other))
    assert action == "reject"
    assert "optimizer.lam (7.0 then, 1.0 now)" in reason


def test_folders_of_sweeps() -> None:
    """DESIGN, folders: name=, the named sweep, or a hash of the sorted command line."""
    assert Path(sweep_dir("my name/..", "seeds", ["seed=1"])).name == "my_name"
    assert (
        Path(sweep_dir(None, "lambda_alpha", ["sweep=lambda_alpha", "tracking=none"])).name == "lambda_alpha"
    )
    more = Path(sweep_dir(None, "lambda_alpha", ["sweep=lambda_alpha", "trainer=laptop"])).name
    assert more.startswith("lambda_alpha-")
    adhoc = Path(sweep_dir(None, None, ["a=1", "b=2,3"])).name
    assert adhoc.startswith("adhoc-")
    assert Path(sweep_dir(None, None, ["b=2,3", "a=1", "on_failure=stop"])).name == adhoc


def test_a_job_keeps_its_folder() -> None:
    """H32: the hash identifies it, the readable part is that of the sweep that made it; no name needs quotes."""
    first = job_name(["a=1", "b=2"], {"a=1"}, {})
    assert first.startswith("b-2-")
    existing = {first.rpartition("-")[2]: first}
    assert job_name(["b=2", "a=1", "tracking=none"], {"b=2"}, existing) == first
    assert job_name(["b=2", "a=3"], {"b=2"}, existing).startswith("a-3-")
    long = job_name([f"+a.{key}=x,'y z'" for key in range(30)], set(), {})
    assert len(long) <= 70
    assert set(long) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


@pytest.mark.parametrize("name", ["日本", "..", "a b", "x" * 61, "a/b", "-a", "a=1"])
def test_a_name_that_is_no_folder(name: str) -> None:
    """Two such names could end in one folder, or in the one of all sweeps."""
    with pytest.raises(ConfigError, match="cannot be a sweep's folder"):
        check_place(Path(sweep_dir(name, None, [])), name)


def test_a_place_that_is_all_right(root: Path) -> None:
    sweeps = root / "outputs" / "sweeps"
    check_place(sweeps / "a-1.b", "a-1.b")
    check_place(sweeps / "adhoc-1", None)
    check_place(root / "elsewhere", "a b")
    with pytest.raises(ConfigError, match="holds all sweeps"):
        check_place(sweeps, None)


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
    assert Options(n_jobs=1).gpus_of_jobs(4) == ()
    assert Options(n_jobs=4).gpus_of_jobs(2) == ("0", "1")
    assert Options(n_jobs=4).gpus_of_jobs(0) == ()
    assert Options(n_jobs=1, gpus=("3",)).gpus_of_jobs(4) == ("3",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert Options(n_jobs=2).gpus_of_jobs(2) == ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    "bad", [(0, None, None), (1.5, None, None), (True, None, None), (2, 0, None), (1, None, [])]
)
def test_bad_options(bad: tuple[object, object, object]) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\."):
        read_options(*bad, "continue")


def test_the_closing_table() -> None:
    rows = [
        ("seed=0", Outcome("done", val_loss=0.5, seconds=125.0)),
        ("seed=1", Outcome("failed", "why\nmore", seconds=1)),
        ("seed=2", Outcome("diverged", "the loss was not finite", kept=True)),
        ("seed=3", Outcome("waiting")),
    ]
    assert closing_table("outputs/sweeps/x", rows).splitlines() == [
        "",
        "4 jobs in outputs/sweeps/x: 1 done, 1 diverged, 1 failed, 1 waiting",
        "  done        seed=0   2 min 05 s  best val loss 0.5",
        "  failed      seed=1        1.0 s  why",
        "  diverged    seed=2         kept  the loss was not finite",
        "  waiting     seed=3",
    ]


def test_lines_of_a_sweep(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H02: what failed is reported at once, with its log."""
    display = Display()
    display.expect(3, ended=1)
    display.started("seed=1")
    display.ended("seed=1", root / "job", Outcome("failed", "why\nmore", seconds=1.0))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "[2/3] started  seed=1"
    assert second.startswith("[2/3] failed   seed=1  1.0 s, why (log: ")
    assert second.endswith("job/output.log)")


def test_a_bar_on_a_terminal_shows_running_jobs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    display = Display()
    display.expect(2, ended=0)
    write(root / "job", "running", epochs=1)
    display.tick([(root / "job", "seed=0"), (root / "none", "seed=1")])
    drawn = capsys.readouterr().err
    assert "seed=0: epoch 1, loss 0.5; seed=1: first epoch" in drawn
    display.tick([])


def test_what_distinguishes_jobs() -> None:
    assert varying([["a=1", "b=1"], ["a=1", "b=2", "c=3"]]) == ["b=1", "b=2 c=3"]
    assert varying([["a=1"]]) == [""]
    assert varying([]) == []


def test_the_states_of_a_sweep(root: Path) -> None:
    """A killed run, a damaged CSV, a NaN, a damaged record, a job that has not begun: all have a state."""
    sweep = SweepFolder(root / "sweep")
    sweep.path.mkdir()
    names = ["done", "nan", "killed", "damaged", "torn", "waiting", "lost", "early", "faulty"]
    cells: list[dict[str, Any]] = [
        {"folder": name, "overrides": [f"x={name}"], "state": "waiting"} for name in names
    ]
    cells[-3]["state"] = "done"
    cells[-2]["state"] = "running"
    cells[-1] |= {"state": "failed", "error": "lam=0"}
    sweep.write({"cells": cells})
    write(sweep.path / "done", time={"wall_s": 5.0}, best={"val_loss": 0.5})
    write(sweep.path / "nan", "diverged", 0, error={"type": "Diverged", "message": "not finite"})
    RunFolder(sweep.path / "nan").append_metrics({"epoch": 1, "train_loss": float("nan"), "wall_s": 2.0})
    write(sweep.path / "killed", "running", epochs=1)
    with (write(sweep.path / "torn", epochs=1) / "metrics.csv").open("a") as file:
        file.write("2,100,0.")
    (sweep.path / "damaged").mkdir()
    (sweep.path / "damaged" / "run.json").write_text("{")
    found = {cell.folder.name: cell for cell in sweep.cells()}
    assert {name: cell.state for name, cell in found.items()} == {
        "done": "done",
        "nan": "diverged",
        "killed": "killed",
        "damaged": "failed",
        "torn": "failed",
        "waiting": "waiting",
        "lost": "waiting",
        "early": "killed",
        "faulty": "failed",
    }
    assert (found["killed"].epoch, found["killed"].epochs, found["killed"].train_loss) == (1, 2, 0.5)
    assert found["done"].elapsed_s == 5.0
    assert found["faulty"].error == "lam=0"
    assert found["lost"].error == "it was done, and its run.json is gone"
    assert list(count_states(each.state for each in found.values())) == [
        "done",
        "diverged",
        "failed",
        "killed",
        "waiting",
    ]
    assert json.loads(json.dumps([cell.as_json() for cell in found.values()], allow_nan=False))


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": 1, "cells": 3}', '{"format": 9, "cells": []}', '{"format": 1, "cells": [3]}'],
)
def test_a_damaged_sweep_is_reported(root: Path, content: str) -> None:
    (root / "sweep.json").write_text(content)
    with pytest.raises(InputError, match="Remove it and repeat the sweep's command"):
        SweepFolder(root).cells()
    with pytest.raises(InputError, match="is not a sweep's folder"):
        SweepFolder(root / "nowhere").read()
