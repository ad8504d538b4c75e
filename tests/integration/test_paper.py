"""`scripts/paper.py` as a process: real sweeps one after another, killed and completed by the same command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from house import House, read_run, wait_until
from sweeps import end

pytestmark = pytest.mark.timeout(240)
# Two sweeps of the chain, the second of which starts from the networks of the first.
CODE = """
import sys; sys.path.insert(0, "scripts"); import paper
paper.STEPS = {name: paper.STEPS[name] for name in ("afad_ggn_fixup", "rsna_ggn_fixup")}
sys.exit(paper.main(["--scale", "debug", *sys.argv[1:]]))
"""
SMALLER = ("tracking=none", "scale.num_images=32", "scale.depth=8")


def start(house: House, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments],
        cwd=house.root,
        env=house.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_chain_is_completed(house: House) -> None:
    """H08, H21: kill -9 in the first sweep, Ctrl-C in the second; finished jobs stay, networks come from the chain."""
    for count, how, code in ((2, signal.SIGKILL, -9), (5, signal.SIGINT, 130)):
        process = start(house, *SMALLER)
        wait_until(lambda count=count: len(house.runs()) >= count, process)  # type: ignore[misc]
        assert end(process, how)[0] == code
    finished = {
        run: (run / "run.json").read_bytes() for run in house.runs() if read_run(run)["state"] == "done"
    }
    assert len(finished) >= 3
    process = start(house, *SMALLER)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert len(house.runs()) == 6
    assert all((run / "run.json").read_bytes() == content for run, content in finished.items())
    for run in house.runs():
        record = read_run(run)
        assert record["state"] == "done"
        if record["group"].endswith("rsna_ggn_fixup"):
            warm_start = house.root / record["config"]["init_from"]
            assert warm_start.parent.name == "paper-debug-synthetic-afad_ggn_fixup"
            assert read_run(warm_start)["seed"] == record["seed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=4"], "seed is given twice: seed=0,1,2 and seed=4"),
        (["trainer.devise=cpu"], "did you mean 'trainer.device'"),
        (["--data", "real"], "dataset afad: no usable raw data"),
    ],
)
def test_bad_input_is_one_message(house: House, arguments: list[str], message: str) -> None:
    process = start(house, *arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert message in err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert not (house.root / "outputs").exists()
