"""``scripts/paper.py`` as a process: stopped, killed, continued; ``train.py`` is a stand-in that records its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from house import House

STAND_IN = '''
"""Records that it was called, then does what the file ``behaviour`` beside it says: end, wait, or fail."""
import os, signal, sys, time
from pathlib import Path

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "src"))
from gramgn.records import RunFolder

given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
step = given["name"].split("-")[-1]

def note(what):
    with (ROOT / "calls").open("a") as file:
        file.write(f"{step} {what} {os.getpid()}\\n")

def stop(signum, frame):
    note(signal.Signals(signum).name)
    time.sleep(0.3)  # saving
    sys.exit(128 + signum)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
note("begins")
if (ROOT / "wait_in").is_file() and (ROOT / "wait_in").read_text() == step:
    time.sleep(60)
for seed in given["seed"].removeprefix("choice(").rstrip(")").split(","):
    folder = ROOT / "outputs" / "sweeps" / given["name"] / f"seed={seed}"
    if not folder.exists():
        RunFolder.create(folder).write_run({"state": "done", "seed": int(seed), "time": {"wall_s": 1.0}})
note("ends")
'''


@pytest.fixture
def stubbed(house: House) -> House:
    """Return a house whose train.py trains nothing."""
    (house.root / "train.py").write_text(STAND_IN)
    return house


def start(house: House, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "scripts/paper.py", *arguments],
        cwd=house.root,
        env=house.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls(house: House) -> list[list[str]]:
    file = house.root / "calls"
    return [line.split() for line in file.read_text().splitlines()] if file.is_file() else []


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def begun(house: House, step: str) -> bool:
    return any(call[:2] == [step, "begins"] for call in calls(house))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_stops_the_chain_and_the_same_command_completes_it(
    stubbed: House, how: signal.Signals, code: int
) -> None:
    """H21: within seconds, train.py told once and waited for; then everything that is missing and no more."""
    (stubbed.root / "wait_in").write_text("afad_sgd_bn")
    process = start(stubbed)
    until(lambda: begun(stubbed, "afad_sgd_bn"))
    asked = time.monotonic()
    process.send_signal(how)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == code, text
    assert time.monotonic() - asked < 5
    assert [call[:2] for call in calls(stubbed)[-1:]] == [["afad_sgd_bn", how.name]]
    assert "the same command goes on where the chain stopped" in text
    assert "Traceback" not in text

    (stubbed.root / "wait_in").unlink()
    before = {path: path.stat().st_mtime_ns for path in stubbed.root.rglob("run.json")}
    assert len(before) == 3
    listed = stubbed.script("scripts/paper.py", "--list")
    assert listed.returncode == 0
    assert "149 jobs, 3 done" in listed.stdout
    again = stubbed.script("scripts/paper.py")
    assert again.returncode == 0, again.stderr
    assert again.stdout == ""
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert "make figures" in again.stderr


def test_a_killed_chain_takes_its_training_along(stubbed: House) -> None:
    """Kill -9 of the chain: train.py is told to stop, and the same command does not meet it."""
    (stubbed.root / "wait_in").write_text("afad_ggn_fixup")
    process = start(stubbed)
    until(lambda: begun(stubbed, "afad_ggn_fixup"))
    child = int(calls(stubbed)[0][2])
    process.kill()
    process.communicate()
    (stubbed.root / "wait_in").unlink()
    again = stubbed.script("scripts/paper.py")
    assert again.returncode == 0, again.stderr
    assert [call[:2] for call in calls(stubbed)[1:4]] == [
        ["afad_ggn_fixup", "SIGTERM"],
        ["afad_ggn_fixup", "begins"],
        ["afad_ggn_fixup", "ends"],
    ]
    until(lambda: is_gone(child))


def test_a_killed_training_is_a_failed_step(stubbed: House) -> None:
    (stubbed.root / "wait_in").write_text("afad_sgd_bn")
    process = start(stubbed)
    until(lambda: begun(stubbed, "afad_sgd_bn"))
    os.kill(int(calls(stubbed)[-1][2]), signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "afad_sgd_bn: train.py was killed by SIGKILL" in text
    assert "rsna_sgd_bn: left out: it starts from afad_sgd_bn" in text
    ended = {call[0] for call in calls(stubbed) if call[1] == "ends"}
    assert {"afad_ggn_spring_gn", "rsna_ggn_fixup", "lambda_alpha_curves"} <= ended


def test_the_same_chain_twice_at_once_is_refused(stubbed: House) -> None:
    (stubbed.root / "wait_in").write_text("afad_ggn_fixup")
    process = start(stubbed)
    until(lambda: begun(stubbed, "afad_ggn_fixup"))
    second = stubbed.script("scripts/paper.py")
    assert second.returncode == 2
    assert f"is running already, as process {process.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale", "huge"], "invalid choice: 'huge'"),
        (["seed=4"], "the chain sets seed itself"),
        (["trainer.devise=cpu"], "did you mean 'trainer.device'"),
        (["--data", "real"], "dataset afad: no usable raw data"),
    ],
)
def test_bad_input_is_one_message(stubbed: House, arguments: list[str], message: str) -> None:
    result = stubbed.script("scripts/paper.py", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert calls(stubbed) == []


def test_the_list_needs_no_torch(stubbed: House) -> None:
    code = (
        "import sys; sys.argv = ['paper.py']; sys.path.insert(0, 'scripts'); import paper\n"
        "assert paper.main(['--list']) == 0; assert 'torch' not in sys.modules"
    )
    result = stubbed.script("-c", code)
    assert result.returncode == 0, result.stderr
    assert "lambda_alpha_curves" in result.stdout
