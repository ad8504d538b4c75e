"""Real launchers: torchrun, which restarts its workers and may itself be killed, and srun, which requeues its job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import one_node
import pytest
from house import BLOBS, House, read_run
from pipeline_runs import SAMPLES, Launch
from test_pipeline import assert_equal

from gramgn.errors import ConfigError
from gramgn.world import World, world

pytestmark = pytest.mark.timeout(180)
SLOW = (*SAMPLES, "model=tiny", "optimizer=slow_sgd", "trainer.batch_size=13", "trainer.epochs=3")
SLOW += ("trainer.dtype=float64",)


def torchrun(house: House, *words: str) -> subprocess.Popen[str]:
    """Start two ranks by torchrun."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", *words],
        cwd=house.root,
        env=house.environment(GLOO_SOCKET_IFNAME="lo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ranks_of(house: House) -> list[int]:
    """Return the processes that run the house's train.py, but for a launcher."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(house.root / "train.py").encode() in words[:4] and b"torch.distributed.run" not in words:
            found.append(int(entry.name))
    return found


def until(condition: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def num_epochs(house: House) -> int:
    files = list((house.root / "outputs").rglob("metrics.csv"))
    return files[0].read_text().count("\n") - 1 if files else 0


def test_torchrun_restarts_and_is_killed(launch: Launch, house: House) -> None:
    """A restart continues in the run's folder; ranks that lose their launcher save what they have and end."""
    words = (str(house.root / "train.py"), *BLOBS, *SLOW, "optimizer.sleep_s=0.3")
    process = torchrun(house, "--nproc-per-node=2", "--max-restarts=1", *words)
    until(lambda: num_epochs(house) == 1)
    first = ranks_of(house)
    os.kill(max(first), signal.SIGKILL)
    until(lambda: len(house.runs()) == 1 and len(read_run(house.runs()[0])["starts"]) == 2)
    (folder,) = house.runs()
    until(lambda: num_epochs(house) == 2)
    second = ranks_of(house)
    assert not set(first) & set(second)
    process.kill()
    text, _ = process.communicate(timeout=60)
    assert "this job was started again: it continues the run in" in text
    until(lambda: not ranks_of(house), 15)
    assert read_run(folder)["state"] == "interrupted"
    assert "SIGTERM" in read_run(folder)["error"]["message"]
    assert (launch(1, f"resume={folder}").codes(), launch(1, *SLOW).codes()) == ([0], [0])
    (whole,) = (each for each in house.runs() if each != folder)
    assert_equal(folder, whole)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[None]:
    """Run a Slurm of one node, or skip the test."""
    if (reason := one_node.missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with one_node.one_node(folder):
        yield


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
def test_srun_requeues_and_continues(house: House) -> None:
    """SIGUSR1 to all ranks: saved, requeued once, continued in the same folder."""
    words = " ".join((*BLOBS, *SLOW, "optimizer.sleep_s=0.3"))
    script = house.root / "job.sh"
    script.write_text(
        f"#!/bin/bash\nsrun --ntasks=2 --kill-on-bad-exit=1 {sys.executable} {house.root / 'train.py'} {words}\n"
    )
    environment = house.environment(GLOO_SOCKET_IFNAME="lo")
    command = ["sbatch", "--parsable", "--ntasks=2", "--requeue", "--open-mode=append", "--output=job.txt"]
    done = subprocess.run(
        [*command, str(script)], cwd=house.root, env=environment, capture_output=True, text=True, check=True
    )
    job = done.stdout.strip()
    until(lambda: num_epochs(house) == 1)
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    until(lambda: read_run(house.runs()[0])["state"] == "interrupted", 20)
    until(lambda: read_run(house.runs()[0])["state"] == "done", 90)
    (folder,) = house.runs()
    run = read_run(folder)
    assert [start["job"] for start in run["starts"]] == [f"slurm {job}"] * 2
    assert run["ranks"] == 2
    text = (house.root / "job.txt").read_text()
    assert text.count(f"Slurm starts job {job} again") == 1


SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}


def test_the_environment_of_srun() -> None:
    mine = world(SRUN)
    assert mine == World(3, 4, 1, "gpu03", 28_638, 0, False, False)
    assert world(SRUN | {"SLURM_STEP_NUM_NODES": "1"}) == World(3, 4, 1, "127.0.0.1", 28_638, 0, False, True)
    again = world(SRUN | {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "SLURM_RESTART_COUNT": "2"})
    assert again == World(3, 4, 1, "host", 29_500, 2, False, False)
    nodes = {"n1": "n1", "n[1,3]": "n1", "a-[07-09]-x,b": "a-07-x", "login,n[1-2]": "login"}
    for written, first in nodes.items():
        found = world(SRUN | {"SLURM_STEP_NODELIST": written})
        assert found is not None
        assert found.address == first
    # A batch script that does not call srun is one process, whatever it has asked for.
    assert world({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    with pytest.raises(ConfigError, match=re.escape("WORLD_SIZE=2 without RANK, LOCAL_RANK, MASTER_ADDR")):
        world({"WORLD_SIZE": "2"})
