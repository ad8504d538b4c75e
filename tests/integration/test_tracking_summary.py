"""The summary run of a sweep, read back from W&B's offline files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from offline_wandb import (
    HOST,
    clean_environment,  # noqa: F401
    exit_codes,
    history,
    make_run,
    read_back,
    run_ids,
    stop_the_service,  # noqa: F401
    stored_config,
    summary,
)
from PIL import Image

from gramgn.errors import InputError
from gramgn.sweep import draw_heatmap
from gramgn.tracking import UploadOptions, log_summary, sweep_table, upload_summary

OFFLINE = UploadOptions(mode="offline", timeout_s=30.0)


def draw(folder: Path, png: Path) -> bool:
    Image.new("L", (4, 3), 128).save(png)
    return True


def add_cell(sweep: Path, name: str, lam: float, alpha: float, state: str, loss: float | None) -> None:
    config = {"optimizer": {"lam": lam, "alpha": alpha}, "seed": 0, "trainer": {"epochs": 10}}
    run, _ = make_run(
        sweep / name, state=state, config=config, group=sweep.name, git={"commit": "c0ffee", "dirty": False}
    )
    if loss is not None:
        run.append_metrics({"epoch": 10, "train_s": 1.0, "train_loss": loss})


def make_sweep(sweep: Path) -> Path:
    """Make a sweep with a cell in every state."""
    add_cell(sweep, "a", 0.5, 0.1, "done", 0.25)
    add_cell(sweep, "b", 0.5, 0.3, "diverged", 1e9)
    add_cell(sweep, "c", 1, 0.1, "failed", None)
    add_cell(sweep, "d", 1, 0.3, "running", 0.5)
    overrides = {
        name: [f"optimizer.lam={lam}", f"optimizer.alpha={alpha}"]
        for name, lam, alpha in (
            ("a", 0.5, 0.1),
            ("b", 0.5, 0.3),
            ("c", 1, 0.1),
            ("d", 1, 0.3),
            ("e", 1, 1.0),
        )
    }
    cells = [{"folder": name, "overrides": words, "state": "waiting"} for name, words in overrides.items()]
    axes = {"optimizer.lam": ["0.5", "1"], "optimizer.alpha": ["0.1", "0.3", "1.0"]}
    (sweep / "sweep.json").write_text(
        json.dumps({"format": 1, "name": sweep.name, "axes": axes, "cells": cells})
    )
    return sweep


TABLE = [
    [0.5, 0.1, 0, 0.25, "done", 10, "a"],
    [0.5, 0.3, 0, None, "diverged", 10, "b"],
    [1.0, 0.1, 0, None, "failed", None, "c"],
    [1.0, 0.3, 0, None, "killed", 10, "d"],
    [1.0, 1.0, None, None, "waiting", None, "e"],
]


def media(sweep: Path, pattern: str) -> list[Path]:
    return sorted(sweep.glob(f"wandb/offline-run-*/files/media/{pattern}"))


def test_one_run_holds_the_heatmap_as_table_and_as_image(tmp_path: Path) -> None:
    """F10: media file and table exist, with lam, alpha, seed, metric and status of every cell."""
    sweep = make_sweep(tmp_path / "a_sweep")
    result = upload_summary(sweep, draw, OFFLINE)
    assert (result.state, result.detail) == ("uploaded", "summary of 5 cells sent (offline)")
    (image,) = media(sweep, "images/heatmap*.png")
    with Image.open(image) as opened:
        assert opened.size == (4, 3)
    (file,) = media(sweep, "table/cells*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["lam", "alpha", "seed", "metric", "status", "epoch", "cell"]
    assert table["data"] == TABLE
    records = read_back(sweep)
    (item,) = history(records)
    assert item["heatmap._type"] == "image-file"
    assert (item["cells._type"], item["cells.nrows"]) == ("table-file", 5)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("a_sweep", "summary", "a_sweep")
    assert run["run_id"] == json.loads((sweep / "uploads.json").read_text())["id"]
    assert exit_codes(records) == [0]
    found = summary(records)
    assert (found["cells_done"], found["cells_killed"], found["git_commit"]) == (1, 1, "c0ffee")
    config = stored_config(records)
    assert config["axes"]["optimizer.lam"] == ["0.5", "1"]
    assert config["shared"] == {"optimizer": {}, "seed": 0, "trainer": {"epochs": 10}}


def test_twice_gives_no_double_and_a_change_replaces_it(tmp_path: Path) -> None:
    """F10: one id and one file for a sweep, however often it is sent."""
    sweep = make_sweep(tmp_path / "a_sweep")
    assert upload_summary(sweep, draw, OFFLINE).state == "uploaded"
    before = {path: path.stat().st_mtime_ns for path in sweep.rglob("*")}
    assert upload_summary(sweep, draw, OFFLINE).state == "unchanged"
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*")} == before
    (first,) = run_ids(read_back(sweep))
    add_cell(sweep, "e", 1, 1.0, "done", 0.125)
    moved = tmp_path / "elsewhere"
    sweep.rename(moved)
    assert upload_summary(moved, draw, OFFLINE).state == "uploaded"
    records = read_back(moved)
    assert run_ids(records) == [first]
    assert {record["run"]["run_group"] for record in records if record["type"] == "run"} == {"a_sweep"}
    assert len(media(moved, "images/*")) == 1
    shutil.rmtree(moved / "wandb")
    assert upload_summary(moved, draw, OFFLINE).state == "uploaded"


def test_nothing_is_left_in_the_users_home_and_nothing_told_of_the_machine(tmp_path: Path) -> None:
    """W&B stages tables in the user's data folder by default, where nobody ever removes them."""
    sweep = make_sweep(tmp_path / "a_sweep")
    before = dict(os.environ)
    upload_summary(sweep, draw, OFFLINE)
    assert dict(os.environ) == before
    assert not list((tmp_path / "home").rglob("artifacts"))
    content = b"".join(path.read_bytes() for path in sweep.rglob("wandb/*/*.wandb"))
    assert b"rsna_synthetic" in content
    for secret in (HOST, sys.executable, os.uname().release, str(Path.cwd())):
        assert secret.encode() not in content, secret


def test_a_sweep_over_other_things_has_their_columns_and_no_image(tmp_path: Path) -> None:
    """A learning rate, a network and several seeds; overrides of the tracking are no axis."""
    sweep = tmp_path / "sgd"
    cells = []
    for index, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.3, 0)]):
        config = {"optimizer": {"lr": lr}, "seed": seed, "tracking": {"project": "mine"}}
        overrides = [f"optimizer.lr={lr}", f"seed={seed}", f"tracking.project=p{index}"]
        run, _ = make_run(sweep / f"cell{index}", state="done", config=config, overrides=overrides)
        run.append_metrics({"epoch": 2, "train_loss": 0.5})
        cells.append({"folder": f"cell{index}", "overrides": overrides})
    (sweep / "sweep.json").write_text(json.dumps({"format": 1, "cells": cells}))
    table = sweep_table(sweep)
    assert table.columns == ["lam", "alpha", "seed", "metric", "status", "optimizer.lr", "epoch", "cell"]
    assert [row[:6] for row in table.rows] == [
        [None, None, 0, 0.5, "done", "0.1"],
        [None, None, 1, 0.5, "done", "0.1"],
        [None, None, 0, 0.5, "done", "0.3"],
    ]
    result = upload_summary(sweep, lambda folder, png: False, OFFLINE)
    assert result.detail == "summary of 3 cells sent (offline, no heatmap)"
    assert not media(sweep, "images/*")
    (run,) = [record["run"] for record in read_back(sweep) if record["type"] == "run"]
    assert run["project"] == "mine"


def test_a_sweep_without_a_finished_cell_and_a_damaged_one(tmp_path: Path) -> None:
    sweep = tmp_path / "all_diverged"
    add_cell(sweep, "a", 0.5, 0.1, "diverged", None)
    (sweep / "sweep.json").write_text(json.dumps({"format": 1, "cells": [{"folder": "a"}]}))
    assert upload_summary(sweep, draw, OFFLINE).state == "uploaded"
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    (waiting / "sweep.json").write_text(json.dumps({"format": 1, "cells": [{"folder": "a"}]}))
    assert upload_summary(waiting, draw, OFFLINE).state == "left out"
    (waiting / "sweep.json").write_text("{")
    with pytest.raises(InputError, match=r"sweep\.json is damaged"):
        upload_summary(waiting, draw, OFFLINE)


def test_a_summary_that_fails_or_hangs_does_not_stop_the_sweep(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """H19, H18: one line with the command for later, within the limit; then the id that was kept is used."""
    sweep = make_sweep(tmp_path / "a_sweep")
    over = threading.Event()

    def fail(folder: Path, png: Path) -> bool:
        raise ArithmeticError("no picture")

    def hang(folder: Path, png: Path) -> bool:
        over.wait(30)
        raise ArithmeticError("over")

    for drawing, said in (fail, "no picture"), (hang, "no answer in 0.5 s"):
        began = time.monotonic()
        log_summary(sweep, drawing, OFFLINE, limit_s=0.5)
        assert time.monotonic() - began < 5
        (line,) = capfd.readouterr().err.splitlines()
        assert said in line
        assert line.endswith(f"python scripts/upload_runs.py {sweep}")
    over.set()
    kept = json.loads((sweep / "uploads.json").read_text())["id"]
    assert not (sweep / "wandb").exists()
    log_summary(sweep, draw, OFFLINE, limit_s=60)
    assert run_ids(read_back(sweep)) == [kept]
    assert capfd.readouterr().err == ""


END = """
import sys
from pathlib import Path
import gramgn.sweep.summary as ending
from gramgn.app._schema import TrackingConfig
def draw(folder, png):
    from PIL import Image
    Image.new("L", (4, 3)).save(png)
    return True
ending.draw_heatmap = draw
ending.log_summary(Path(sys.argv[1]), TrackingConfig(sys.argv[2], "gramgn", None, 3.0, 3.0))
print(sorted({"wandb", "matplotlib", "torch"} & set(sys.modules)))
"""


def end_of_sweep(
    sweep: Path, mode: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", END, str(sweep), mode],
        env={**os.environ, **environment, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done, time.monotonic() - began


def test_mode_none_does_nothing_and_imports_nothing(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "a_sweep")
    before = sorted(sweep.rglob("*"))
    done, _ = end_of_sweep(sweep, "none")
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert sorted(sweep.rglob("*")) == before


def test_mode_offline_is_silent(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "a_sweep")
    done, _ = end_of_sweep(sweep, "offline")
    assert (done.stdout, done.stderr) == ("['wandb']\n", "")
    assert len(media(sweep, "images/*")) == 1


def test_mode_online_without_a_server_goes_offline_in_bounded_time(tmp_path: Path) -> None:
    """H19, H18: the sweep's process ends, the summary is on disk."""
    sweep = make_sweep(tmp_path / "a_sweep")
    done, seconds = end_of_sweep(sweep, "online", WANDB_API_KEY="a" * 40)
    assert seconds < 30
    (line,) = done.stderr.splitlines()
    assert "the sweep's summary stays offline, because" in line
    assert f"scripts/upload_runs.py {sweep}" in line
    assert len(run_ids(read_back(sweep))) == 1


def make_grid(sweep: Path, lams: tuple[float, ...], alphas: tuple[float, ...]) -> Path:
    """Make a grid as sweep=lambda_alpha leaves it; the smallest alpha diverged, the last cell did not begin."""
    cells = []
    for lam in lams:
        for alpha in alphas:
            cells.append({"folder": f"{lam}-{alpha}", "overrides": [f"optimizer.lam={lam}"]})
            if (lam, alpha) == (lams[-1], alphas[-1]):
                continue
            optimizer = {"lam": lam, "alpha": alpha, "damping_convention": "mean"}
            diverged = alpha == alphas[0]
            run, _ = make_run(
                sweep / f"{lam}-{alpha}",
                state="diverged" if diverged else "done",
                config={"optimizer": optimizer, "seed": 0, "trainer": {"epochs": 10, "scale": "laptop"}},
                choices={"sweep": "lambda_alpha", "model": "resnet_fixup"},
                optimizer={"name": "ggn"},
                model={"name": "resnet_fixup"},
                device={"kind": "cpu", "name": "a processor"},
                starts=[{"time_utc": "2026-01-01T00:00:00Z"}],
            )
            for epoch in range(1, 2 if diverged else 11):
                run.append_metrics({"epoch": epoch, "train_s": float(epoch), "train_loss": 1 / (epoch + lam)})
    axes = {"optimizer.lam": [*map(str, lams)], "optimizer.alpha": [*map(str, alphas)]}
    (sweep / "sweep.json").write_text(json.dumps({"format": 1, "name": "grid", "axes": axes, "cells": cells}))
    return sweep


def test_the_image_is_the_heatmap_of_figure_2c(tmp_path: Path) -> None:
    """F10: what figures draw of the sweep's own runs is what W&B shows; other sweeps have none."""
    sweep = make_grid(tmp_path / "grid", (0.5, 1.0), (0.1, 1.0, 10.0))
    result = upload_summary(sweep, draw_heatmap, OFFLINE)
    assert result.detail == "summary of 6 cells sent (offline)"
    (image,) = media(sweep, "images/heatmap*.png")
    assert draw_heatmap(sweep, tmp_path / "again.png")
    assert image.read_bytes() == (tmp_path / "again.png").read_bytes()
    with Image.open(image) as opened:
        assert min(opened.size) > 300
        assert len(set(opened.convert("L").tobytes())) > 20
    statuses = [row[4] for row in sweep_table(sweep).rows]
    assert statuses == ["diverged", "done", "done", "diverged", "done", "waiting"]
    assert not draw_heatmap(make_sweep(tmp_path / "a_sweep"), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
