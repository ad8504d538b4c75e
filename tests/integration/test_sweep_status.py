"""scripts/sweep_status.py: how far sweeps are, as text and as JSON, at any time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from house import SMALL, Call, House
from sweeps import SLOW, TINY, end, wait_for_epoch

pytestmark = pytest.mark.timeout(180)
SCRIPT = "scripts/sweep_status.py"


def test_while_it_runs_and_after_a_kill(house: House) -> None:
    process = house.start(*SLOW, "trainer.epochs=300", "seed=0,1", "name=live")
    wait_for_epoch(house, process, "seed=0", 2)
    done = house.script(SCRIPT, "live")
    assert done.returncode == 0, done.stderr
    headline, _, running, waiting = done.stdout.splitlines()
    assert headline == "live: 2 jobs: 1 waiting, 1 running"
    assert running.split()[0] == "running"
    assert running.split()[1].endswith("/300")
    assert running.endswith("seed=0")
    assert waiting.split() == ["waiting", "seed=1"]
    (content,) = json.loads(house.script(SCRIPT, "--json", "live").stdout)
    assert content["active"] is True
    assert content["states"] == {"waiting": 1, "running": 1}
    assert content["cells"][0]["epoch"] >= 2
    assert content["cells"][0]["train_loss"] > 0
    end(process, signal.SIGINT)
    (content,) = json.loads(house.script(SCRIPT, "live", "--json").stdout)
    assert content["active"] is False
    assert content["states"] == {"waiting": 1, "interrupted": 1}


def test_all_sweeps_and_none(house: House) -> None:
    """An empty outputs folder is no error; without names each sweep has a line; torch is not imported."""
    done = house.script(SCRIPT)
    assert (done.returncode, done.stdout.startswith("there are no sweeps in")) == (0, True)
    assert house.script(SCRIPT, "--json").stdout.strip() == "[]"
    for name in ("one", "two"):
        assert house.run(*TINY, "seed=0", f"name={name}").returncode == 0
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path('scripts/sweep_status.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'hydra', 'wandb', 'numpy'} & set(sys.modules)"
    )
    done = house.script("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["one: 1 jobs: 1 done", "two: 1 jobs: 1 done"]


def test_a_sweep_that_is_not_there(call: Call, house: House) -> None:
    assert call(*SMALL, "trainer.epochs=1", "seed=0", "name=alpha", multirun=True) == 0
    done = house.script(SCRIPT, "alhpa")
    assert done.returncode == 2
    assert "did you mean 'alpha'" in done.stderr
    assert done.stderr.count("error:") == 1
    done = house.script(SCRIPT, str(house.runs()[0]))
    assert done.returncode == 2
    assert "is not a sweep's folder" in done.stderr


def test_one_damaged_sweep_hides_no_other(house: House) -> None:
    """Each is read for itself; the exit code says that one could not be, and ``head`` may stop reading."""
    sweeps = house.root / "outputs" / "sweeps"
    for name, text in (("bad", ""), ("good", '{"format": 1, "cells": []}')):
        (sweeps / name).mkdir(parents=True)
        (sweeps / name / "sweep.json").write_text(text)
    (sweeps / "odd" / "sweep.json").mkdir(parents=True)
    done = house.script(SCRIPT)
    assert (done.returncode, done.stdout.strip()) == (2, "good: 0 jobs:")
    assert "Remove it and repeat the sweep's command" in done.stderr
    assert done.stderr.count("error:") == 2
    code = f"set -o pipefail; ({sys.executable} {SCRIPT} good; echo $? >&2) | true"
    piped = subprocess.run(
        ["bash", "-c", code],
        cwd=house.root,
        env=house.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.stderr.strip() == "0"
