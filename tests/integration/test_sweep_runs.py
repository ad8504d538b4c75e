"""Sweeps from command line to records: isolation, failures, what is checked beforehand, several jobs at a time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from house import SMALL, Call, House, read_rows, read_run
from sweeps import MULTI, PAIR, cell, states, sweep_of

pytestmark = pytest.mark.timeout(180)


def test_failed_jobs_do_not_affect_the_others(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H02, H15: exception, full memory and crash: each in its log, at once and in the table; exit code 1."""
    assert call(*SMALL, "dataset.bad='crash','memory','abort',''", "name=faults", multirun=True) == 1
    err = capsys.readouterr().err
    before, table = err.split("4 jobs in")
    assert [line.split()[0] for line in table.splitlines()[1:5]] == ["failed"] * 3 + ["done"]
    assert states(house, "faults") == ["failed"] * 3 + ["done"]
    reasons = ("the plug-in's own mistake", "MemoryError", "killed by SIGABRT")
    for reason, found in zip(reasons, sweep_of(house, "faults").cells(), strict=False):
        line = next(line for line in before.splitlines() if line.startswith("[") and reason in line)
        assert f"{found.folder.name}/output.log" in line
        assert reason in table
        assert reason in (found.error or "")
        assert read_run(found.folder)["state"] == "failed"
    log = (cell(house, "dataset.bad='crash'", "faults").folder / "output.log").read_text()
    assert "Traceback" in log
    assert "RuntimeError" in log
    assert "Traceback" not in err


def test_stop_starts_no_further_job(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """H16: on_failure=stop: the first failure ends the sweep, exit code 1; continue then does the rest."""
    faults = (*SMALL, "dataset.bad='','crash','nan'", "name=stopped")
    assert call(*faults, "on_failure=stop", multirun=True) == 1
    assert "no further one was started" in capsys.readouterr().err
    assert states(house, "stopped") == ["done", "failed", "waiting"]
    assert call(*faults, multirun=True) == 1
    assert states(house, "stopped") == ["done", "failed", "failed"]
    assert "on_failure" not in read_run(house.runs()[0])["config"]


def test_a_fault_of_all_jobs_is_one_message(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H16: raw data that is not there: found once, before any job, nothing on disk."""
    before = house.files()
    assert call("dataset=afad", "seed=0,1,2,3", "tracking=none", multirun=True) == 2
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert "scripts/prepare_data.py" in err
    assert "the same for all 4 jobs" in err
    assert "Traceback" not in err
    assert house.files() == before


def test_faulty_jobs_are_found_before_the_first(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H16: stop rejects the sweep and leaves nothing; continue runs the others, and reports each at once."""
    options = (*SMALL, "optimizer.lam=-1,1,abc", "name=some")
    before = house.files()
    assert call(*options, "on_failure=stop", multirun=True) == 2
    err = capsys.readouterr().err
    assert "2 of 3 jobs cannot be run" in err
    assert "optimizer.lam='abc' must be a number" in err
    assert err.count("error:") == 1
    assert house.files() == before
    assert call(*options, multirun=True) == 1
    assert states(house, "some") == ["failed", "done", "failed"]
    failed = cell(house, "optimizer.lam=abc", "some")
    assert "must be a number" in (failed.error or "")
    assert "must be a number" in (failed.folder / "output.log").read_text()
    assert not (failed.folder / "run.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["on_failure=maybe"], "on_failure=maybe: allowed are continue, stop"),
        (["hydra.run.dir=here"], "a sweep's is outputs/sweeps/<name>"),
        (["hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs=0"),
        (["hydra.sweeper.points=['seed=1 seed=2']"], "seed is given twice"),
        (["hydra.sweeper.points=[3]"], "hydra.sweeper.points=[3]"),
        (["hydra.sweeper.extend={key:model}"], "hydra.sweeper.extend"),
        (["hydra.sweeper.max_batch_size=0"], "hydra.sweeper.max_batch_size=0"),
        (["hydra.launcher.jobs=2"], "jobs"),
        (["resume=outputs/runs/a,outputs/runs/b"], "resume= is for a single run"),
        (["hydra/launcher=basic"], "hydra/launcher=isolated"),
        (["hydra.sweep.subdir=one"], "two different jobs have the same folder"),
        (["seed=3"], "seed is given twice: seed=0,1 and seed=3"),
        (["optimizer.lam=1,1"], "optimizer.lam=1,1 names 1 more than once"),
        (["trainer.threads=1,2"], "trainer.threads changes no result"),
        (["name=one,two"], "name= names the whole sweep"),
        (["name='a b'"], "e.g. name=a_b"),
        (["model=glob(*x)"], "model=glob(*x) has no values, so that nothing would be run: glob() chooses"),
        (["optimizer.lamm=1,2"], "did you mean 'optimizer.lam'"),
        (["sweep=seedz"], "did you mean 'seeds'"),
    ],
)
def test_bad_sweeps_are_rejected(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    """H09, H17: one message, exit code 2, nothing on disk."""
    small = [
        word for word in SMALL if not any(option.split("=")[0] == word.split("=")[0] for option in options)
    ]
    before = house.files()
    assert call(*small, "seed=0,1", *options, multirun=True) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert house.files() == before


def test_a_read_only_place_is_one_message(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    (house.root / "outputs").mkdir()
    (house.root / "outputs" / "sweeps").write_text("a file where a folder should be")
    assert call(*SMALL, "seed=0,1", multirun=True) == 2
    err = capsys.readouterr().err
    assert str(house.root / "outputs" / "sweeps") in err
    assert "Traceback" not in err


def test_several_jobs_at_once(call: Call, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """H30: two at a time with one thread each, GPUs handed out one per job, no process that had touched CUDA."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("WANDB_RUN_ID", "of-another")
    options = (
        *PAIR[:-2],
        "dataset._target_=outside.Telling",
        "seed=range(4)",
        "trainer.epochs=1",
        "name=four",
    )
    options += ("hydra.launcher.n_jobs=2", "hydra.launcher.threads_per_job=1", "hydra.launcher.gpus=[5,7]")
    assert call(*options, "+hydra.job.env_set.GREETING=hello", multirun=True) == 0
    folders = [each.folder for each in sweep_of(house, "four").cells()]
    logs = [(folder / "output.log").read_text().splitlines() for folder in folders]
    told = ["".join(line for line in log if line.startswith("gpus=")) for log in logs]
    assert [line.split()[1:] for line in told] == [["threads=1", "clean=True", "env=hello", "run=None"]] * 4
    assert sorted(line.split()[0] for line in told) == ["gpus=5", "gpus=5", "gpus=7", "gpus=7"]
    assert [read_run(folder)["threads"] for folder in folders] == [1] * 4
    record = sweep_of(house, "four").read()
    spans = [_span(entry) for entry in record["cells"]]
    assert max(sum(start <= other < stop for start, stop in spans) for other, _ in spans) == 2
    assert record["n_jobs"] == 2


def test_jobs_leave_nothing_in_memory(call: Call, house: House) -> None:
    """H11, H15: every job starts with the same memory, failed ones between them included."""
    options = [entry for entry in SMALL if not entry.startswith("model")]
    options += ["model=resnet_fixup", "trainer.epochs=1", "seed=range(4)", "dataset.bad='',memory"]
    assert call(*options, "name=many", multirun=True) == 1
    cells = [each for each in sweep_of(house, "many").cells() if each.state == "done"]
    assert len(cells) == 4
    peaks = [float(read_rows(each.folder)[0]["peak_mem_mib"]) for each in cells]
    assert max(peaks) < 1.05 * min(peaks)


def test_the_sweeping_process_needs_no_torch(house: House) -> None:
    """H30: what composes and watches imports neither torch nor wandb, and so can never touch CUDA."""
    code = (
        "import sys, runpy; sys.argv = ['train.py', *sys.argv[1:]]\n"
        "try:\n    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'pandas', 'wandb', 'matplotlib'} & set(sys.modules)"
    )
    done = house.script("-c", code, *MULTI, *SMALL, "trainer.epochs=1", "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert states(house) == ["done", "done"]


def test_the_order_of_overrides_does_not_matter(call: Call, house: House) -> None:
    """H32: folders are short and safe, and the same for the same command in any order."""
    odd = ("init_from=null", "trainer.epochs=1", "optimizer.lam=1,2")
    assert call(*SMALL, *odd, multirun=True) == 0
    before = {each.folder for each in sweep_of(house).cells()}
    others = [word for word in SMALL if not word.startswith("tracking")]
    assert call(*reversed(odd), *others, "tracking=none", "on_failure=stop", multirun=True) == 0
    assert {each.folder for each in sweep_of(house).cells()} == before
    assert sweep_of(house).path.name.startswith("adhoc-")
    assert all(len(folder.name) <= 70 and "=" not in folder.name for folder in before)


def _span(entry: dict[str, Any]) -> tuple[datetime, datetime]:
    return datetime.fromisoformat(entry["started"]), datetime.fromisoformat(entry["ended"])
