"""The W&B mirror, read back with W&B's own command; no test reaches beyond a closed port of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb
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
from PIL import Image

from gramgn.errors import ConfigError, InputError
from gramgn.records import write_atomic
from gramgn.sweep import draw_heatmap
from gramgn.tracking import (
    NothingToUploadError,
    TrackingConfig,
    WandbMirror,
    log_summary,
    sweep_table,
    upload_config,
    upload_run,
    upload_summary,
)

OFFLINE = TrackingConfig(finish_timeout_s=30.0)


def test_the_offline_file_holds_every_row_of_metrics_csv(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H07, H10: one W&B row for each row of the CSV, equal in every value, on two axes; the config nests."""
    folder, run = make_run(tmp_path / "run", group="a_sweep", optimizer={"name": "ggn"})
    mirror = WandbMirror.start(folder, run, OFFLINE)
    for row in ROWS:
        folder.append_metrics(row)
        mirror.log_rows(folder.read_metrics()[-1:])
    mirror.finish()
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
    assert stored_config(records) == folder.read_run()["config"]
    (sent,) = [record["run"] for record in records if record["type"] == "run"]
    assert (sent["run_id"], sent["run_group"], sent["job_type"]) == (run["id"], "a_sweep", "ggn")
    assert capfd.readouterr() == ("", "")


def test_a_job_that_fails_reports_it_and_the_next_has_its_own_run(tmp_path: Path) -> None:
    """H01, H04."""
    folders = []
    for job in (1, 2):
        folder, run = make_run(tmp_path / f"job{job}", config={**CONFIG, "seed": job})
        folders.append(folder)
        mirror = WandbMirror.start(folder, run, OFFLINE)
        mirror.finish(*((1, "ArithmeticError: it broke") if job == 1 else ()))
    records = [read_back(folder.path) for folder in folders]
    assert len({run_ids(found)[0] for found in records}) == 2
    assert [exit_codes(found) for found in records] == [[1], [0]]
    assert summary(records[0])["error"] == "ArithmeticError: it broke"
    assert [stored_config(found)["seed"] for found in records] == [1, 2]


def test_the_id_that_an_agent_chose_is_the_one_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H24: under `wandb agent` the environment decides; a resume elsewhere continues the same W&B run."""
    folder, run = make_run(tmp_path / "run")
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-agent")
    wandb.teardown()  # W&B reads the environment once per process
    first = WandbMirror.start(folder, run, OFFLINE)
    first.finish()
    assert first.run_id == "of-the-agent"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    monkeypatch.delenv("WANDB_RUN_ID")
    wandb.teardown()
    second = WandbMirror.start(folder, {**run, "wandb": {"id": first.run_id}}, OFFLINE)
    second.finish()
    assert run_ids(read_back(folder.path)) == [first.run_id] * 2 == [second.run_id] * 2


def test_a_resumed_run_keeps_its_id_and_repeats_no_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H24, H07: two starts, one id, every epoch once, no complaint about steps."""
    folder, run = make_run(tmp_path / "run")
    first = WandbMirror.start(folder, run, OFFLINE)
    first.log_rows(ROWS[:2])
    first.finish(130, "interrupted")
    second = WandbMirror.start(folder, run, OFFLINE)
    # The checkpoint of epoch 2 was lost: epoch 2 is trained again and offered again.
    second.log_rows(ROWS[1:])
    second.finish(0, best={"epoch": 3, "val_loss": 0.25})
    records = read_back(folder.path)
    assert [item["by_epoch/epoch"] for item in history(records)] == [1, 2, 3]
    assert run_ids(records) == [run["id"], run["id"]]
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
    sweep = make_sweep(tmp_path / "a_sweep")
    upload_summary(sweep, OFFLINE, draw)
    folder, run = make_run(tmp_path / "run")
    mirror = WandbMirror.start(folder, run, OFFLINE)
    mirror.log_rows(ROWS)
    mirror.finish()
    assert "WANDB_DATA_DIR" not in os.environ
    assert not list((tmp_path / "home").rglob("artifacts"))
    secrets = [HOST, "alice", str(Path.cwd()), sys.executable, os.uname().release]
    # Where the image lies on this disk is in the sweep's file for `wandb sync`, and in nothing that is uploaded.
    for root, own in (folder.path, [*secrets, str(tmp_path)]), (sweep / "upload", secrets):
        files = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "logs"]
        content = b"".join(path.read_bytes() for path in files)
        assert b"rsna_synthetic" in content
        for secret in own:
            assert secret.encode() not in content, secret
    kinds = {record["type"] for record in read_back(folder.path)}
    assert kinds == {"header", "run", "telemetry", "metric", "summary", "history", "exit"}


def test_mode_none_writes_nothing(tmp_path: Path) -> None:
    folder, run = make_run(tmp_path / "run")
    mirror = WandbMirror.start(folder, run, TrackingConfig("none"))
    mirror.log_rows(ROWS)
    mirror.finish(1, "x")
    assert not (folder.path / "wandb").exists()
    log_summary(tmp_path, TrackingConfig("none"), draw)
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["run"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "ofline"}, r"tracking.mode=ofline: .*did you mean 'offline'"),
        ({"init_timeout_s": float("nan")}, "number of seconds above 0"),
        ({"project": ""}, "name of a W&B project"),
    ],
)
def test_settings_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrackingConfig(**values)


class BrokenRun:
    """A W&B run whose calls do not come back for a long while, or fail."""

    def __init__(self, log: Callable[[], None], finish: Callable[[], None]) -> None:
        self.summary: dict[str, Any] = {}
        self.id = "broken"
        self.log = lambda values: log()
        self.finish = lambda exit_code: finish()


def fail(*_: object) -> bool:
    raise ConnectionError("service is gone")


def test_a_finish_that_hangs_is_left_with_the_command_to_upload(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H18: closing has a limit of its own, whatever W&B does."""
    folder, _ = make_run(tmp_path / "run")
    run = BrokenRun(log=lambda: None, finish=lambda: time.sleep(20))
    began = time.monotonic()
    WandbMirror(folder, {}, run, TrackingConfig("online", finish_timeout_s=0.1)).finish(0)
    assert time.monotonic() - began < 5
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"scripts/upload_runs.py {folder.path}")


def test_a_mirror_that_fails_does_not_stop_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H19: a failure while logging is reported once, and the run goes on."""
    folder, _ = make_run(tmp_path / "run")
    (folder.path / "wandb").mkdir()
    broken = BrokenRun(log=fail, finish=fail)
    mirror = WandbMirror(folder, {}, broken, TrackingConfig(finish_timeout_s=0.1))
    for row in ROWS:
        mirror.log_rows([row])
    mirror.finish(0)
    (line,) = capfd.readouterr().err.splitlines()
    assert "service is gone" in line


TRAIN = """
import sys
from pathlib import Path
from gramgn.tracking import TrackingConfig, WandbMirror, log_summary
from gramgn.records import RunFolder
folder, limit_s = RunFolder.open(sys.argv[1]), float(sys.argv[2])
config = TrackingConfig("online", init_timeout_s=limit_s, finish_timeout_s=limit_s)
mirror = WandbMirror.start(folder, folder.read_run(), config)
for epoch in (1, 2):
    folder.append_metrics({"epoch": epoch, "train_s": 1.5 * epoch})
    mirror.log_rows(folder.read_metrics()[-1:])
folder.update_run(state="done")
print(mirror.mode)
mirror.finish(0)
log_summary(folder.path.parent, config, None)
"""


@pytest.mark.parametrize(
    ("key", "reason"),
    [({}, "there is no API key (set WANDB_API_KEY or run `wandb login`)"), ({"WANDB_API_KEY": "a" * 40}, "")],
)
def test_online_without_a_key_or_a_network_works_offline(
    tmp_path: Path, key: dict[str, str], reason: str
) -> None:
    """H05, H18, H19: no account, no terminal, no server: one line each for run and sweep; all is recorded."""
    folder, _ = make_run(tmp_path / "run")
    (tmp_path / "sweep.json").write_text('{"format": 1, "cells": [{"folder": "run"}]}')
    began = time.monotonic()
    done = subprocess.run(
        # Without a key it answers at once, however long that takes on a busy machine.
        [sys.executable, "-c", TRAIN, str(folder.path), "2" if key else "20"],
        env={**os.environ, **key, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert time.monotonic() - began < 40
    assert done.stdout == "offline\n"
    run_line, sweep_line = done.stderr.splitlines()
    assert f"working offline, because {reason}" in run_line
    assert run_line.endswith(f"scripts/upload_runs.py {folder.path}")
    assert f"the sweep's summary stays offline, because {reason}" in sweep_line
    assert len(folder.read_metrics()) == 2
    assert [item["by_epoch/epoch"] for item in history(read_back(folder.path))] == [1, 2]
    assert len(run_ids(read_back(tmp_path / "upload"))) == 1


def test_a_killed_run_is_sent_whole_from_its_records(tmp_path: Path) -> None:
    """H22: run.json and metrics.csv are enough; twice gives the same one run."""
    folder, run = make_run(tmp_path / "run", config={**CONFIG, "tracking": {"project": "mine"}})
    for row in ROWS:
        folder.append_metrics(row)
    config = upload_config(folder.path, mode="offline")
    for _ in range(2):
        assert upload_run(folder, config) == "3 rows (offline)"
    records = read_back(folder.path)
    assert run_ids(records) == [run["id"]]
    expected = folder.read_metrics()
    assert all(same(as_metrics_row(i), row) for i, row in zip(history(records), expected, strict=True))
    assert exit_codes(records) == [1]
    assert stored_config(records)["optimizer"]["lam"] == 1.0
    (sent,) = [record["run"] for record in records if record["type"] == "run"]
    assert sent["project"] == "mine"
    assert upload_config(folder.path, mode="offline", project="yours").project == "yours"


def test_what_cannot_be_sent_yet_is_left_out(tmp_path: Path) -> None:
    """H22: a live run and one without epochs; a run that diverged at once is sent."""
    live, _ = make_run(tmp_path / "live")
    live.append_metrics(ROWS[0])
    with live.lock(), pytest.raises(NothingToUploadError, match="still running"):
        upload_run(live, OFFLINE)
    empty, _ = make_run(tmp_path / "empty", state="interrupted")
    with pytest.raises(NothingToUploadError, match="no rows"):
        upload_run(empty, OFFLINE)
    diverged, _ = make_run(
        tmp_path / "diverged", state="diverged", error={"type": "Diverged", "message": "nan"}
    )
    upload_run(diverged, OFFLINE)
    records = read_back(diverged.path)
    assert (exit_codes(records), summary(records)["error"]) == ([3], "nan")


def upload(repository: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "scripts" / "upload_runs.py"), *map(str, arguments)],
        env={**os.environ, **environment, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_sweep_is_sent_with_its_summary_though_one_run_is_damaged(tmp_path: Path, repository: Path) -> None:
    """H22, H01: every job its own run in the sweep's group; a damaged one is named, the exit code is 1."""
    sweep = make_sweep(tmp_path / "sweeps" / "a_sweep")
    (sweep / "b" / "run.json").write_text("{")
    done = upload(repository, tmp_path, "--mode", "offline")
    assert done.returncode == 1
    assert "b/run.json is damaged" in done.stdout
    assert done.stdout.splitlines()[-1] == "3 uploaded, 1 failed, 1 left out"
    assert "Traceback" not in done.stderr
    sent = [record["run"] for record in read_back(tmp_path) if record["type"] == "run"]
    assert Counter(run["run_group"] for run in sent) == {"a_sweep": 3}
    assert len({run["run_id"] for run in sent}) == 3


def test_an_upload_that_cannot_work(tmp_path: Path, repository: Path) -> None:
    """H22: bad input is exit code 2, a server that is not there is exit code 1 after one wait, not one per run."""
    missing = upload(repository, tmp_path / "nowhere", "--mode", "offline")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("error: there is no run in")
    sweep = make_sweep(tmp_path / "sweep")
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    done = upload(repository, sweep, "--timeout-s", "1", WANDB_API_KEY="a" * 40)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nothing was uploaded: W&B cannot be used (")
    assert {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()} == before


def draw(folder: Path, png: Path) -> bool:
    Image.new("L", (4, 3), 128).save(png)
    return True


AXES = {"optimizer.lam": ["0.5", "1"], "optimizer.alpha": ["0.1", "1"]}


def add_cell(sweep: Path, name: str, lam: float, alpha: float, state: str, loss: float | None) -> None:
    config = {"optimizer": {"lam": lam, "alpha": alpha}, "seed": 0, "trainer": {"epochs": 10}}
    run, _ = make_run(
        sweep / name, state=state, config=config, group=sweep.name, git={"commit": "c0ffee", "dirty": False}
    )
    if loss is not None:
        run.append_metrics({"epoch": 10, "train_s": 1.0, "train_loss": loss})


def write_sweep(sweep: Path, cells: dict[str, list[str]], axes: dict[str, list[str]] = AXES) -> Path:
    content = {
        "format": 1,
        "name": sweep.name,
        "axes": axes,
        "cells": [{"folder": name, "overrides": words, "state": "waiting"} for name, words in cells.items()],
    }
    write_atomic(sweep / "sweep.json", json.dumps(content))
    return sweep


def make_sweep(sweep: Path) -> Path:
    """Make a sweep with a job in every state."""
    add_cell(sweep, "a", 0.5, 0.1, "done", 0.25)
    add_cell(sweep, "b", 0.5, 0.3, "diverged", 1e9)
    add_cell(sweep, "c", 1, 0.1, "failed", None)
    add_cell(sweep, "d", 1, 0.3, "running", 0.5)
    pairs = {"a": (0.5, 0.1), "b": (0.5, 0.3), "c": (1, 0.1), "d": (1, 0.3), "e": (1, 1.0)}
    overrides = {
        name: [f"optimizer.lam={lam}", f"optimizer.alpha={alpha}"] for name, (lam, alpha) in pairs.items()
    }
    return write_sweep(sweep, overrides)


TABLE = [
    [0.5, 0.1, 0, 0.25, "done", 10, "a"],
    [0.5, 0.3, 0, None, "diverged", 10, "b"],
    [1.0, 0.1, 0, None, "failed", None, "c"],
    [1.0, 0.3, 0, None, "killed", 10, "d"],
    [1.0, 1.0, 0, None, "waiting", None, "e"],
]


def media(sweep: Path, pattern: str) -> list[Path]:
    return sorted(sweep.glob(f"upload/wandb/offline-run-*/files/media/{pattern}"))


def test_one_run_holds_the_heatmap_as_table_and_as_image(tmp_path: Path) -> None:
    """F10: media file and table exist, with lam, alpha, seed, metric and status of every job; twice is once."""
    sweep = make_sweep(tmp_path / "a_sweep")
    upload_summary(sweep, OFFLINE, draw)
    (first,) = run_ids(read_back(sweep))
    moved = tmp_path / "elsewhere"
    sweep.rename(moved)
    assert upload_summary(moved, OFFLINE, draw) == "summary of 5 jobs (offline)"
    (image,) = media(moved, "images/heatmap*.png")
    with Image.open(image) as opened:
        assert opened.size == (4, 3)
    (file,) = media(moved, "table/cells*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["lam", "alpha", "seed", "metric", "status", "epoch", "cell"]
    assert table["data"] == TABLE
    records = read_back(moved)
    (item,) = history(records)
    assert item["heatmap._type"] == "image-file"
    assert (item["cells._type"], item["cells.nrows"]) == ("table-file", 5)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["run_id"], run["run_group"], run["job_type"]) == (first, "a_sweep", "summary")
    assert run["display_name"] == "a_sweep"
    assert exit_codes(records) == [0]
    found = summary(records)
    assert (found["cells_done"], found["cells_killed"], found["git_commit"]) == (1, 1, "c0ffee")
    config = stored_config(records)
    assert config["axes"]["optimizer.lam"] == ["0.5", "1"]
    assert config["shared"]["seed"] == 0


def test_a_sweep_over_other_things_has_their_columns_and_no_image(tmp_path: Path) -> None:
    """A learning rate and several seeds."""
    sweep = tmp_path / "sgd"
    cells = {}
    for index, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.3, 0)]):
        config = {"optimizer": {"lr": lr}, "seed": seed, "trainer": {"epochs": 2}}
        run, _ = make_run(sweep / f"cell{index}", state="done", config=config)
        run.append_metrics({"epoch": 2, "train_loss": 0.5})
        cells[f"cell{index}"] = [f"optimizer.lr={lr}", f"seed={seed}"]
    write_sweep(sweep, cells, axes={"optimizer.lr": ["0.1", "0.3"], "seed": ["0", "1"]})
    table = sweep_table(sweep)
    assert list(table.columns) == [
        "lam",
        "alpha",
        "seed",
        "metric",
        "status",
        "optimizer.lr",
        "epoch",
        "cell",
    ]
    assert table["optimizer.lr"].tolist() == ["0.1", "0.1", "0.3"]
    assert table["seed"].tolist() == [0, 1, 0]
    assert (
        upload_summary(sweep, OFFLINE, lambda folder, png: False) == "summary of 3 jobs (offline, no heatmap)"
    )
    assert not media(sweep, "images/*")


def test_a_sweep_that_has_not_begun_and_a_damaged_one(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, {"a": []})
    with pytest.raises(NothingToUploadError):
        upload_summary(sweep, OFFLINE, draw)
    (sweep / "sweep.json").write_text("{")
    with pytest.raises(InputError, match=r"sweep\.json is damaged"):
        upload_summary(sweep, OFFLINE, draw)


def test_a_summary_that_fails_does_not_stop_the_sweep(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H19: one line with the command for later."""
    sweep = make_sweep(tmp_path / "a_sweep")
    log_summary(sweep, OFFLINE, fail)
    (line,) = capfd.readouterr().err.splitlines()
    assert "service is gone" in line
    assert line.endswith(f"python scripts/upload_runs.py {sweep}")


def test_a_summary_that_hangs_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """H18: the sweep's process ends within its limit."""
    over = threading.Event()
    began = time.monotonic()
    log_summary(
        make_sweep(tmp_path / "a_sweep"),
        TrackingConfig(init_timeout_s=0.2, finish_timeout_s=0.2),
        lambda folder, png: over.wait(30),
        drawing_timeout_s=0.1,
    )
    assert time.monotonic() - began < 5
    over.set()
    assert "no answer in 0.5 s" in capfd.readouterr().err


def test_the_image_is_the_heatmap_of_figure_2c(tmp_path: Path) -> None:
    """F10: what figures draw of the sweep's own runs is what W&B shows; other sweeps have none."""
    sweep, cells = tmp_path / "grid", {}
    for lam in (0.5, 1.0):
        for alpha in (0.1, 1.0, 10.0):
            run, _ = make_run(
                sweep / f"{lam}-{alpha}",
                state="diverged" if alpha == 0.1 else "done",
                config={
                    "optimizer": {"lam": lam, "alpha": alpha, "damping_convention": "mean"},
                    "seed": 0,
                    "trainer": {"epochs": 2, "scale": "laptop"},
                },
                choices={"sweep": "lambda_alpha", "model": "resnet_fixup"},
                optimizer={"name": "ggn"},
                model={"name": "resnet_fixup"},
                device={"kind": "cpu", "name": "a processor"},
                starts=[{"time_utc": "2026-01-01T00:00:00Z"}],
            )
            for epoch in range(1, 2 if alpha == 0.1 else 3):
                run.append_metrics({"epoch": epoch, "train_s": float(epoch), "train_loss": 1 / (epoch + lam)})
            cells[run.path.name] = [f"optimizer.lam={lam}", f"optimizer.alpha={alpha}"]
    write_sweep(sweep, cells)
    upload_summary(sweep, OFFLINE, draw_heatmap)
    (image,) = media(sweep, "images/heatmap*.png")
    with Image.open(image) as opened:
        assert min(opened.size) > 300
        assert len(set(opened.convert("L").tobytes())) > 20
    other = make_sweep(tmp_path / "a_sweep")
    shutil.rmtree(other / "a")
    assert not draw_heatmap(other, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_mirror_is_light() -> None:
    """Neither wandb nor pandas nor torch is loaded before it is needed."""
    code = (
        "import sys, gramgn.tracking\n"
        "print([m for m in ('torch', 'wandb', 'hydra', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
