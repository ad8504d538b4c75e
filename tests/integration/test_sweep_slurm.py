"""Sweeps on a cluster: a Slurm of one node that the tests start and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import Call, House, losses, num_rows, read_run
from one_node import missing, one_node, slurm
from sweeps import MULTI, SLOW, cell, end, processes_in, states, sweep_of, until, wait_for_epoch

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or "?"),
]
SLURM = (*MULTI, "hydra/launcher=slurm")


@pytest.fixture(scope="module", autouse=True)
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    pytest.importorskip("submitit", reason="submitit is not installed: pip install '.[slurm]'")
    with one_node(tmp_path_factory.mktemp("slurm")):
        yield


def jobs_of(house: House, name: str) -> dict[str, str]:
    """Return Slurm's names of a sweep's jobs, by label."""
    cells = json.loads(sweep_of(house, name).sweep_json.read_text())["cells"]
    return {each["folder"]: each["job"] for each in cells}


def logs(house: House, name: str) -> str:
    """Return what nodes wrote, for a test that fails."""
    folder = sweep_of(house, name).path
    return "\n".join(path.read_text() for path in [*folder.glob("slurm/*.out"), *folder.glob("*/output.log")])


def ranks_of_jobs() -> list[int]:
    """Return the processes of all ranks of all jobs."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"submitit.core._submit" in words and b"srun" not in words:
            found.append(int(entry.name))
    return found


def begin(house: House, *words: str, expect: str = "submitted") -> subprocess.Popen[str]:
    """Start a sweep and return when its jobs are in the queue."""
    process = house.start(*SLURM, *words, start_new_session=True)
    assert process.stderr is not None
    seen = ""
    while expect not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    return process


def test_attach_and_complete(house: House, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C leaves the jobs queued, the same command attaches, and the records are those of a local sweep."""
    words = (*SLOW, "optimizer.sleep_s=0.05", "trainer.epochs=2", "seed=0,1,2")
    slurm("scontrol", "update", "nodename=n1", "state=drain", "reason=test")  # a job can wait for its node
    process = begin(house, "name=there", *words)
    code, err = end(process, signal.SIGINT, group=True)
    assert code == 130, err
    jobs = jobs_of(house, "there")
    array = next(iter(jobs.values())).partition("_")[0]
    assert (
        f"left with Slurm, queued or running: 3 jobs. The same command attaches to what is there; scancel {array}"
        in err
    )
    assert sorted(jobs.values()) == [f"{array}_{index}" for index in range(3)]
    (status,) = json.loads(house.script("scripts/sweep_status.py", "there", "--json").stdout)
    assert status["states"] == {"waiting": 3}
    # The third word is Slurm's reason, which differs by version.
    found = [each["slurm"].split(maxsplit=2)[:2] for each in status["cells"]]
    assert found == [[job, "PENDING"] for job in jobs.values()]
    assert not status["active"]
    assert call("name=there", *words, multirun=True) == 2
    assert "in Slurm's queue: watch them with hydra/launcher=slurm" in capsys.readouterr().err
    process = begin(house, "name=there", *words, expect="attached to 3 jobs in Slurm's queue")
    slurm("scontrol", "update", "nodename=n1", "state=resume")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err + logs(house, "there")
    assert "3 jobs in outputs/sweeps/there: 3 done" in err
    assert jobs_of(house, "there") == jobs
    once_more = house.run(*SLURM, "name=there", *words)
    assert (once_more.returncode, "kept: 3 of 3 jobs" in once_more.stderr) == (0, True)
    assert call("name=here", *words, multirun=True) == 0
    there, here = sweep_of(house, "there").path, sweep_of(house, "here").path
    folders = sorted(path.parent.name for path in here.glob("*/run.json"))
    assert sorted(path.parent.name for path in there.glob("*/run.json")) == folders
    for name in folders:
        assert losses(there / name) == losses(here / name)
        assert read_run(there / name)["resume_count"] == 0
        assert set(read_run(there / name)) == set(read_run(here / name))


def test_requeued_jobs_resume_their_folders(house: House) -> None:
    """A signal before the time limit, to the last job of an array; then a job that needs its place (SIGTERM alone)."""
    words = ("name=requeued", *SLOW, "optimizer.sleep_s=0.5", "trainer.epochs=6", "seed=0,1")
    process = begin(house, *words)
    last = wait_for_epoch(house, "seed=1", 1, process)
    first = wait_for_epoch(house, "seed=0", 1, process)
    job = jobs_of(house, "requeued")[last.name]
    assert job.endswith("_1")
    slurm("scancel", "--signal=USR2", job)
    until(lambda: read_run(last)["state"] == "interrupted", process)
    assert "SIGUSR2" in read_run(last)["error"]["message"]
    until(lambda: len(read_run(last)["starts"]) == 2 and read_run(last)["state"] == "running", process)
    assert cell(house, "seed=1", "requeued").state == "running"
    assert len(read_run(first)["starts"]) == 1  # the number of the last job is also that of the array
    slurm("sbatch", "--partition=high", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1")
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err + logs(house, "requeued")
    assert "requeued seed=1" in err
    assert states(house, "requeued") == ["done", "done"]
    assert len(read_run(last)["starts"]) == 3
    assert len(house.runs()) == 2


def test_killed_jobs_are_reported(house: House) -> None:
    """By kill -9 and by scancel, within 30 s; the same command then completes them."""
    words = ("name=killed", *SLOW, "optimizer.sleep_s=0.3", "trainer.epochs=4", "seed=0,1")
    process = begin(house, *words)
    killed = wait_for_epoch(house, "seed=0", 1, process)
    for child in processes_in(killed):
        os.kill(child, signal.SIGKILL)
    cancelled = wait_for_epoch(house, "seed=1", 1, process)
    slurm("scancel", jobs_of(house, "killed")[cancelled.name])
    start = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    assert states(house, "killed") == ["failed", "interrupted"]
    assert "ended as FAILED without a result" in err
    assert read_run(killed)["error"]["type"] == "Killed"
    again = house.run(*SLURM, *words)
    assert again.returncode == 0, again.stderr + logs(house, "killed")
    assert states(house, "killed") == ["done", "done"]
    assert [read_run(folder)["resume_count"] for folder in (killed, cancelled)] == [1, 1]


def test_several_ranks_per_job(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run folder; a rank that is killed is named, and the same command completes the job."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    words = ("name=ranks", *SLOW, "optimizer.sleep_s=0.3", "trainer.epochs=4", "hydra.launcher.ranks=2")
    process = begin(house, *words)
    until(lambda: num_rows(house) > 0, process)
    (folder,) = house.runs()
    (second,) = (each for each in ranks_of_jobs() if each not in processes_in(folder))
    os.kill(second, signal.SIGKILL)
    start = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    assert "rank 1 ended without a word" in err, err + logs(house, "ranks")
    assert read_run(folder)["state"] == "failed"
    again = house.run(*SLURM, *words)
    assert again.returncode == 0, again.stderr + logs(house, "ranks")
    assert (len(house.runs()), read_run(folder)["resume_count"], read_run(folder)["ranks"]) == (1, 1, 2)


def test_a_time_limit_before_the_first_step(house: House) -> None:
    """Such a job would be started for ever: it ends, and says what to change."""
    process = begin(house, "name=late", *SLOW, "seed=0")
    folder = sweep_of(house, "late").path
    until(lambda: any(folder.glob("*/output.log")), process)
    time.sleep(0.5)
    (job,) = jobs_of(house, "late").values()
    slurm("scancel", "--signal=USR2", job)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "stopped by SIGUSR2 before it could save anything: raise hydra.launcher.time" in err, err
    assert states(house, "late") == ["interrupted"]


def test_what_slurm_rejects(house: House) -> None:
    """One message with exit code 2, and nothing on disk."""
    for wrong, reason in (
        ("hydra.launcher.partition=nope", "invalid partition specified: nope"),
        ("hydra.launcher.time=soon", "Invalid --time specification"),
    ):
        done = house.run(*SLURM, *SLOW, "seed=0,1", wrong)
        assert done.returncode == 2
        assert done.stderr.count("error:") == 1
        assert f"Slurm rejects the jobs: {reason}" in done.stderr
        assert not (house.root / "outputs").exists()
