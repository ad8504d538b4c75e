"""What the jobs of a sweep ask Slurm for: checked settings, and the parameters that submitit gets."""

from __future__ import annotations

import shutil
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from gramgn.errors import ConfigError
from gramgn.records import SweepFolder
from gramgn.sweep import Resources, read_resources


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Slurm and submitit are here."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("_cluster")
def test_the_file_has_the_defaults(repository: Path) -> None:
    given = yaml.safe_load((repository / "conf/hydra/launcher/slurm.yaml").read_text())
    del given["_target_"]
    assert read_resources(given, "continue") == Resources()


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpus": 0}, "cpus=0 must be a number from 1"),
        ({"gpus": 1.5}, "gpus=1.5 must be a number from 0"),
        ({"time": ""}, "time='' must be a number of minutes, or a text"),
        ({"mem": ["1G"]}, "must be a number of MB, or a text such as 16G"),
        ({"setup": "module load cuda"}, "must be a list of shell commands"),
        ({"options": "qos=high"}, "must be options of sbatch with their values"),
        ({"nodes": 2, "ranks": 3}, "ranks=3 must be a multiple of hydra.launcher.nodes=2"),
        ({"partitions": "low"}, r"there is no hydra.launcher.partitions .*\(did you mean 'partition'\?\)"),
    ],
)
def test_settings_that_are_not_valid(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_resources(given, "continue")


def test_a_machine_without_slurm_or_submitit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is needed unless this launcher is chosen; then one message names what is missing."""
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the extra slurm: python -m pip install '\.\[slurm\]'"):
        read_resources({}, "continue")
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigError, match="sbatch, squeue, srun not found: start the command on a login node"
    ):
        read_resources({}, "continue")


@pytest.mark.usefixtures("_cluster")
def test_ranks_and_devices_per_node() -> None:
    given = {"nodes": 2, "ranks": 8, "gpus": 1, "cpus": 3, "setup": ["true"], "options": {"qos": "high"}}
    found = read_resources(given, "stop").parameters("mine")
    assert (found["nodes"], found["ntasks_per_node"], found["gpus_per_node"]) == (2, 4, 4)
    assert "--cpus-per-task=3" in found["srun_args"]
    assert found["setup"][0] == "true"
    assert found["additional_parameters"] == {"requeue": True, "qos": "high"}
    assert "partition" not in found


def test_the_state_of_jobs_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Slurm says about a job that no process here watches: of one that waits again, of one that is gone."""
    queue = {"7_0": "PENDING", "7_1": "RUNNING", "7_2": "FAILED"}
    monkeypatch.setattr("gramgn.records.sweep_folder.job_states", lambda: queue)
    monkeypatch.setattr("gramgn.records.sweep_folder.pending_reasons", lambda: {"7_0": "PartitionTimeLimit"})
    folder = SweepFolder(tmp_path)
    begun = {"7_0": "running", "7_1": "waiting", "7_2": "running", "7_3": "waiting"}
    cells = [{"folder": job, "job": job, "state": state, "overrides": []} for job, state in begun.items()]
    folder.write({"cells": cells})
    assert [cell.state for cell in folder.cells()] == ["waiting", "running", "killed", "waiting"]
    assert [cell.slurm for cell in folder.cells()] == [
        "7_0 PENDING PartitionTimeLimit",
        "7_1 RUNNING",
        None,
        None,
    ]
