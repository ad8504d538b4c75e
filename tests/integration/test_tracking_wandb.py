"""The W&B mirror, read back with W&B's own command; no test reaches beyond a closed port of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offline_wandb import (
    CONFIG,
    HOST,
    ROWS,
    as_metrics_row,
    clean_environment,  # noqa: F401
    exit_codes,
    history,
    make_run,
    read_back,
    run_ids,
    same,
    stop_the_service,  # noqa: F401
    stored_config,
    summary,
)

from gramgn.errors import ConfigError
from gramgn.records import RunFolder
from gramgn.tracking import WandbMirror


def test_the_offline_file_holds_every_row_of_metrics_csv(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H07: one W&B row for each row of the CSV, equal in every value, on two axes of its own."""
    folder, run = make_run(tmp_path / "run")
    with WandbMirror.start(folder, run) as mirror:
        for row in ROWS:
            folder.append_metrics(row)
            assert mirror.log_rows(folder.read_metrics()[-1:]) == 1
    records = read_back(folder.path)
    found, expected = history(records), folder.read_metrics()
    assert len(found) == len(expected) == len(ROWS)
    for item, row in zip(found, expected, strict=True):
        assert same(as_metrics_row(item), row), (item, row)
        assert item["by_time/train_s"] == row["train_s"]
        assert item["by_time/train_loss"] == item["by_epoch/train_loss"]
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    axes = {metric["glob_name"]: metric["step_metric"] for metric in metrics if "glob_name" in metric}
    assert axes == {"by_epoch/*": "by_epoch/epoch", "by_time/*": "by_time/train_s"}
    assert capfd.readouterr() == ("", "")


def test_the_stored_config_is_the_nested_config(tmp_path: Path) -> None:
    """H10: the config nests as in run.json, numbers are numbers."""
    folder, run = make_run(tmp_path / "run")
    with WandbMirror.start(folder, run):
        pass
    assert stored_config(read_back(folder.path)) == folder.read_run()["config"]


def test_every_job_has_a_run_of_its_own_also_when_one_raises(tmp_path: Path) -> None:
    """H01, H04: three jobs of one process, three runs with their own config; the failed one says so."""
    folders = []
    for job in (1, 2, 3):
        folder, run = make_run(tmp_path / f"job{job}", config={**CONFIG, "seed": job})
        folders.append(folder)
        try:
            with WandbMirror.start(folder, run, group="sweep", job_type="train") as mirror:
                mirror.log_rows([{"epoch": 1, "train_s": 1.0}])
                if job == 2:
                    raise ArithmeticError("it broke")
        except ArithmeticError:
            assert job == 2
    records = [read_back(folder.path) for folder in folders]
    assert len({run_ids(found)[0] for found in records}) == 3
    assert [len(run_ids(found)) for found in records] == [1, 1, 1]
    assert [exit_codes(found) for found in records] == [[0], [1], [0]]
    assert summary(records[1])["error"] == "ArithmeticError: it broke"
    for job, found in enumerate(records, start=1):
        (run,) = [record["run"] for record in found if record["type"] == "run"]
        assert run["config"]["update"]["seed"] == job
        assert (run["run_group"], run["job_type"]) == ("sweep", "train")


def test_a_resumed_run_keeps_its_id_and_repeats_no_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H24, H07: two starts, one id, every epoch once, no complaint about steps."""
    folder, run = make_run(tmp_path / "run")
    first = WandbMirror.start(folder, run)
    first.log_rows(ROWS[:2])
    first.finish(130, "interrupted")
    assert first.record is not None
    second = WandbMirror.start(folder, run, run_id=first.record["id"])
    # The checkpoint of epoch 2 was lost: epoch 2 is trained again and offered again.
    assert second.log_rows(ROWS[1:]) == 1
    second.finish(0, best={"epoch": 3, "val_loss": 0.25})
    records = read_back(folder.path)
    assert [item["by_epoch/epoch"] for item in history(records)] == [1, 2, 3]
    assert len(run_ids(records)) == 2
    assert set(run_ids(records)) == {first.run_id}
    assert exit_codes(records) == [130, 0]
    found = summary(records)
    assert (found["error"], found["best_epoch"], found["best_val_loss"]) == ("interrupted", 3, 0.25)
    assert capfd.readouterr() == ("", "")


def test_nothing_about_the_machine_is_written_for_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host name, user, path, command line, code, git remote or hardware in what W&B would upload."""
    monkeypatch.setattr(sys, "argv", ["/home/alice/secret-project/train.py", "dataset.root=/home/alice/rsna"])
    monkeypatch.setenv("WANDB_USERNAME", "alice-account")
    monkeypatch.setenv("WANDB_EMAIL", "alice@example.org")
    folder, run = make_run(tmp_path / "run")
    with WandbMirror.start(folder, run) as mirror:
        mirror.log_rows(ROWS)
    files = [path for path in folder.path.rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert {path.name for path in files} == {
        ".lock",
        "run.json",
        "mirrored.json",
        f"run-{mirror.run_id}.wandb",
    }
    content = b"".join(path.read_bytes() for path in files)
    assert b"rsna_synthetic" in content
    for secret in (HOST, "alice", str(tmp_path), str(Path.cwd()), sys.executable, os.uname().release):
        assert secret.encode() not in content, secret
    kinds = {record["type"] for record in read_back(folder.path)}
    assert kinds == {"header", "run", "telemetry", "metric", "summary", "history", "exit"}


def test_mode_none_writes_nothing(tmp_path: Path) -> None:
    folder, run = make_run(tmp_path / "run")
    mirror = WandbMirror.start(folder, run, mode="none")
    assert (mirror.log_rows(ROWS), mirror.finish(1, "x"), mirror.record) == (0, None, None)
    assert not (folder.path / "wandb").exists()
    with pytest.raises(ConfigError, match=r"'ofline'.*did you mean 'offline'"):
        WandbMirror.start(folder, run, mode="ofline")


class HangingRun:
    """A W&B run whose calls do not come back for a long while, or fail."""

    def __init__(self, log: Callable[[], None], finish: Callable[[], None]) -> None:
        self.summary: dict[str, Any] = {}
        self.log = lambda values: log()
        self.finish = lambda exit_code: finish()


def test_a_finish_that_hangs_is_left_with_the_command_to_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H18: closing has a limit of its own, whatever W&B does."""
    folder, _ = make_run(tmp_path / "run")
    monkeypatch.setattr("gramgn.tracking._mirror.FINISH_GRACE_S", 0.1)
    run = HangingRun(log=lambda: None, finish=lambda: time.sleep(20))
    mirror = WandbMirror(folder, run, "online", "id", finish_timeout_s=0.1)
    began = time.monotonic()
    message = mirror.finish(0)
    assert time.monotonic() - began < 5
    assert message is not None
    assert f"scripts/upload_runs.py {folder.path}" in message
    assert "\n" not in message


def test_a_mirror_that_fails_does_not_stop_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H19: a failure while logging is said once, and the run goes on."""

    def fail() -> None:
        raise ConnectionError("service is gone")

    folder, _ = make_run(tmp_path / "run")
    (folder.path / "wandb").mkdir()
    mirror = WandbMirror(folder, HangingRun(log=fail, finish=fail), "offline", "id", finish_timeout_s=0.1)
    assert [mirror.log_rows([row]) for row in ROWS] == [0, 0, 0]
    assert mirror.finish(0) is None
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "service is gone" in said[0]


TRAIN = """
import sys
from gramgn.tracking import WandbMirror
from gramgn.records import RunFolder
folder = RunFolder.open(sys.argv[1])
mirror = WandbMirror.start(folder, folder.read_run(), mode="online", init_timeout_s=3.0, finish_timeout_s=3.0)
folder.update_run(wandb=mirror.record)
for epoch in (1, 2):
    folder.append_metrics({"epoch": epoch, "train_s": 1.5 * epoch})
    mirror.log_rows(folder.read_metrics()[-1:])
folder.update_run(state="done")
print(mirror.finish(0))
"""


def online(tmp_path: Path, **environment: str) -> tuple[RunFolder, subprocess.CompletedProcess[str], float]:
    folder, _ = make_run(tmp_path / "run")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(folder.path)],
        env={**os.environ, **environment, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return folder, done, time.monotonic() - began


def test_online_without_a_key_works_offline_at_once(tmp_path: Path) -> None:
    """H05: no account, no terminal: one warning, no waiting, everything recorded."""
    folder, done, _ = online(tmp_path)
    assert done.stdout == "None\n"
    assert len(done.stderr.splitlines()) == 1
    assert "there is no API key (set WANDB_API_KEY or run `wandb login`)" in done.stderr
    assert len(folder.read_metrics()) == 2
    records = read_back(folder.path)
    assert [item["by_epoch/epoch"] for item in history(records)] == [1, 2]
    assert folder.read_run()["wandb"] == {"id": run_ids(records)[0], "mode": "offline"}


def test_online_without_a_network_works_offline_in_bounded_time(tmp_path: Path) -> None:
    """H19, H18: a server that is not there costs its time limit, not the training, and the process ends."""
    folder, done, seconds = online(tmp_path, WANDB_API_KEY="a" * 40)
    assert done.stdout == "None\n"
    assert len(done.stderr.splitlines()) == 1
    assert "working offline, because" in done.stderr
    assert f"scripts/upload_runs.py {folder.path}" in done.stderr
    assert seconds < 30
    assert len(folder.read_metrics()) == 2
    assert len(history(read_back(folder.path))) == 2
