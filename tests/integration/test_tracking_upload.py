"""Uploading from our own records; no test reaches beyond a closed port of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from offline_wandb import (
    CONFIG,
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
)

from gramgn.errors import InputError
from gramgn.records import RunFolder
from gramgn.tracking import UploadOptions, WandbMirror, find_uploads, upload_all, upload_run

OFFLINE = UploadOptions(mode="offline")


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


def filled(path: Path, **entries: Any) -> RunFolder:
    folder, _ = make_run(path, **{"state": "done", "wandb": None, **entries})
    folder.append_metrics(ROWS[0])
    return folder


def make_sweep(path: Path, cells: int = 2) -> list[RunFolder]:
    runs = [
        filled(path / f"cell{i}", id=f"{path.name}{i}", group=path.name, optimizer={"name": "ggn"})
        for i in range(cells)
    ]
    planned = [{"folder": run.path.name, "overrides": [f"seed={i}"]} for i, run in enumerate(runs)]
    (path / "sweep.json").write_text(json.dumps({"format": 1, "name": path.name, "cells": planned}))
    return runs


def files_below(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def states(results: Any) -> list[str]:
    return [result.state for result in results]


def test_a_killed_run_is_uploaded_whole_from_our_own_files(tmp_path: Path, repository: Path) -> None:
    """H22: run.json and metrics.csv are enough, with a torn last line and no W&B files left; twice is once."""
    folder, _ = make_run(tmp_path / "run", wandb={"id": "abcd1234", "mode": "offline"})
    for row in ROWS:
        folder.append_metrics(row)
    folder.metrics_csv.write_bytes(folder.metrics_csv.read_bytes()[:-4])
    for said in ("uploaded", "2 rows sent (offline)"), ("unchanged", "uploaded before"):
        done = upload(repository, folder.path, "--mode", "offline")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].split(None, 2) == [said[0], str(folder.path), said[1]]
    records = read_back(folder.path)
    assert run_ids(records) == ["abcd1234"]
    expected = folder.read_metrics(report=lambda message: None)
    assert len(expected) == 2
    assert all(same(as_metrics_row(i), row) for i, row in zip(history(records), expected, strict=True))
    assert exit_codes(records) == [1]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert run["config"]["update"]["optimizer"]["lam"] == 1.0


def test_segments_of_a_resumed_run_become_one_run(tmp_path: Path) -> None:
    """H24, H04: three starts, one of them without a mirror, are one id with every epoch once."""
    folder, run = make_run(tmp_path / "run", group="a_sweep", optimizer={"name": "ggn"})
    for start, mode in enumerate(("offline", "none", "offline")):
        before = (folder.read_run().get("wandb") or {}).get("id")
        mirror = WandbMirror.start(folder, run, mode=mode, run_id=before)
        folder.append_metrics(ROWS[start])
        mirror.log_rows(folder.read_metrics()[-1:])
        mirror.finish(130)
        folder.update_run(wandb=mirror.record or folder.read_run().get("wandb"), state="interrupted")
    segments = read_back(folder.path / "wandb")
    assert [item["by_epoch/epoch"] for item in history(segments)] == [1, 3]
    folder.update_run(state="done")
    assert upload_run(folder, OFFLINE).state == "uploaded"
    records = read_back(folder.path / "upload")
    assert run_ids(records) == [folder.read_run()["wandb"]["id"]] == run_ids(segments)[:1]
    assert [item["by_epoch/epoch"] for item in history(records)] == [1, 2, 3]
    (sent,) = [record["run"] for record in records if record["type"] == "run"]
    assert (sent["run_group"], sent["job_type"]) == ("a_sweep", "ggn")
    axes = [
        r["metric"]["step_metric"] for r in records if r["type"] == "metric" and "glob_name" in r["metric"]
    ]
    assert axes == ["by_epoch/epoch", "by_time/train_s"]


def test_a_run_that_changed_is_sent_again_and_replaces_the_former(tmp_path: Path) -> None:
    """H22: one file of one id, whatever was sent before; a file that was removed is written again."""
    folder = filled(tmp_path / "run")
    assert upload_run(folder, OFFLINE).state == "uploaded"
    first = folder.read_run()["wandb"]["id"]
    assert upload_run(folder, OFFLINE).state == "unchanged"
    folder.append_metrics(ROWS[1])
    assert upload_run(folder, OFFLINE).detail == "2 rows sent (offline)"
    assert upload_run(folder, UploadOptions(mode="offline", again=True)).state == "uploaded"
    assert upload_run(folder, UploadOptions(mode="offline", project="another")).state == "uploaded"
    shutil.rmtree(folder.path / "upload")
    assert upload_run(folder, UploadOptions(mode="offline", project="another")).state == "uploaded"
    records = read_back(folder.path)
    assert run_ids(records) == [first]
    assert len(history(records)) == 2


def test_a_sweep_is_uploaded_with_its_summary_and_twice_is_once(tmp_path: Path, repository: Path) -> None:
    """H22, H01: every job its own run in the sweep's group; a second time nothing is sent or written."""
    sweep = tmp_path / "sweeps" / "a_sweep"
    runs = make_sweep(sweep)
    first = upload(repository, tmp_path, sweep, runs[0].path, "--mode", "offline")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == "3 uploaded"
    sent = [record["run"] for record in read_back(tmp_path) if record["type"] == "run"]
    assert Counter((run["run_group"], run["job_type"]) for run in sent) == {
        ("a_sweep", "ggn"): 2,
        ("a_sweep", "summary"): 1,
    }
    assert len({run["run_id"] for run in sent}) == 3
    before = files_below(tmp_path)
    second = upload(repository, sweep, "--mode", "offline")
    assert (second.returncode, second.stdout.splitlines()[-1]) == (0, "3 unchanged")
    assert files_below(tmp_path) == before
    runs[1].append_metrics(ROWS[1])
    assert states(upload_all(find_uploads([sweep]), OFFLINE)) == ["unchanged", "uploaded", "uploaded"]
    assert len(read_back(tmp_path)) > 0
    assert sorted(run_ids(read_back(tmp_path))) == sorted(run["run_id"] for run in sent)


def test_one_failure_does_not_keep_the_others(tmp_path: Path, repository: Path) -> None:
    """H22: a damaged run is named in the closing table, the others are sent, the exit code is 1."""
    for name in ("a", "b", "c"):
        filled(tmp_path / name)
    (tmp_path / "b" / "run.json").write_text("{")
    done = upload(repository, tmp_path, "--mode", "offline")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["uploaded", "failed", "uploaded"]
    assert "b/run.json is damaged" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 uploaded, 1 failed"
    assert "Traceback" not in done.stderr


def test_what_cannot_be_sent_yet_is_left_out_and_said(tmp_path: Path) -> None:
    """H22: a live run, one without epochs and a copy are no failures; a run that diverged at once is sent."""
    live = filled(tmp_path / "a_live", state="running")
    make_run(tmp_path / "b_empty", state="interrupted")
    make_run(tmp_path / "c_diverged", state="diverged", error={"type": "Diverged", "message": "nan"})
    original = filled(tmp_path / "d_run", id="0123")
    shutil.copytree(original.path, tmp_path / "e_copy")
    with live.lock():
        results = list(upload_all(find_uploads([tmp_path]), OFFLINE))
    assert states(results) == ["left out", "left out", "uploaded", "uploaded", "left out"]
    assert "still running" in results[0].detail
    assert "nothing to upload" in results[1].detail
    assert f"copy of {original.path}" in results[4].detail
    assert exit_codes(read_back(tmp_path / "c_diverged")) == [3]
    # The same run, once it is free: it was killed.
    assert upload_run(live, OFFLINE).state == "uploaded"


def test_an_upload_that_cannot_work_says_so(tmp_path: Path, repository: Path) -> None:
    """H22: bad input is exit code 2, a server that is not there is exit code 1; the runs are left as they were."""
    missing = upload(repository, tmp_path / "nowhere")
    (tmp_path / "nothing").mkdir()
    without = upload(repository, tmp_path / "nothing")
    empty, _ = make_run(tmp_path / "empty")
    nothing = upload(repository, empty.path, "--mode", "offline")
    for done, said in (
        (missing, "error: there is no folder"),
        (without, "holds no run"),
        (nothing, "nothing to"),
    ):
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
    make_sweep(tmp_path / "sweep", cells=8)
    before = files_below(tmp_path / "sweep")
    began = time.monotonic()
    refused = upload(repository, tmp_path / "sweep", "--timeout-s", "2", WANDB_API_KEY="a" * 40)
    # One wait for the server, not one a run.
    assert time.monotonic() - began < 20
    keyless = upload(repository, tmp_path / "sweep")
    for done in refused, keyless:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: nothing was uploaded: W&B cannot be used (")
        assert len(done.stderr.splitlines()) == 1
    assert "there is no API key" in keyless.stderr
    assert files_below(tmp_path / "sweep") == before


def test_a_server_that_goes_away_is_given_up_after_three_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H19: the time limit is not waited for once a run; what was not tried is said."""
    make_sweep(tmp_path / "sweep", cells=5)
    tried = []

    def fail(*arguments: Any) -> None:
        tried.append(arguments)
        raise TimeoutError("no answer in 60 s")

    monkeypatch.setattr("gramgn.tracking._mirror.open_anew", fail)
    results = list(upload_all(find_uploads([tmp_path]), UploadOptions()))
    assert states(results) == ["failed"] * 6
    assert len(tried) == 3
    assert "no answer in 60 s" in results[2].detail
    assert "not tried" in results[3].detail
    assert not list(tmp_path.rglob("uploads.json"))


class OnlineRun:
    """A W&B run that takes everything."""

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def finish(self, exit_code: int) -> None:
        """Nothing is left to send."""


@pytest.mark.parametrize(("resumed", "expected"), [(False, "unchanged"), (True, "uploaded")])
def test_a_run_that_was_online_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, expected: str
) -> None:
    """H22: what the mirror sent whole in one start need not be sent; after a resume nobody knows, so it is."""
    config = {**CONFIG, "tracking": {"project": "mine", "entity": "we"}}
    folder, run = make_run(tmp_path / "run", config=config, group="a_sweep")
    (folder.path / "wandb").mkdir()
    server = OnlineRun()
    monkeypatch.setattr("gramgn.tracking._mirror.open_run", lambda *_, **__: (server, "online"))
    monkeypatch.setattr("gramgn.tracking._mirror.open_anew", lambda *_: server)
    if resumed:
        folder.append_metrics(ROWS[0])
    mirror = WandbMirror.start(
        folder,
        run,
        mode="online",
        project="mine",
        entity="we",
        group="a_sweep",
        run_id="ab" * resumed or None,
    )
    folder.append_metrics(ROWS[1])
    mirror.log_rows(folder.read_metrics()[-1:])
    folder.update_run(state="done", wandb=mirror.record)
    assert mirror.finish(0) is None
    assert upload_run(folder).state == expected
    assert [row["by_epoch/epoch"] for row in server.rows] == ([2, 1, 2] if resumed else [2])
    # Once it is known to be there, nothing is sent; elsewhere it is not.
    assert upload_run(folder).state == "unchanged"
    assert upload_run(folder, UploadOptions(entity="others")).state == "uploaded"
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert upload_run(folder, UploadOptions(entity="others")).state == "uploaded"


def test_what_was_noted_must_be_readable(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run")
    (folder.path / "uploads.json").write_text("[]")
    with pytest.raises(InputError, match=r"uploads\.json is damaged. Remove it"):
        upload_run(folder, OFFLINE)
