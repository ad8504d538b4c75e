"""Whole runs: what they leave behind, and that they can be repeated."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from house import BLOBS, REPOSITORY, SMALL, Call, House, losses, read_rows, read_run
from offline_wandb import as_metrics_row, exit_codes, history, read_back, stored_config

from gramgn.records import RunFolder


def test_a_sweep_of_two_optimizers(house: House) -> None:
    """H01, H07, H10: two jobs, two W&B runs, each with its own config and every row of metrics.csv."""
    done = house.run("-m", "optimizer=ggn,sgd", "dataset=rsna_synthetic", "trainer=debug")
    assert done.returncode == 0, done.stderr
    ggn, sgd = sorted(house.runs(), key=lambda folder: read_run(folder)["optimizer"]["name"])
    records = {folder: read_back(folder) for folder in (ggn, sgd)}
    ids = {read_run(folder)["wandb"]["id"] for folder in (ggn, sgd)}
    assert len(ids) == 2
    for folder, content in records.items():
        config = read_run(folder)["config"]
        assert stored_config(content) == config
        assert exit_codes(content) == [0]
        rows = [as_metrics_row(item) for item in history(content)]
        assert rows == RunFolder(folder).read_metrics()
        assert len(rows) == 2
    assert read_run(ggn)["config"]["optimizer"]["lam"] == 1.0
    assert read_run(sgd)["config"]["optimizer"]["momentum"] == 0.9
    assert "2 jobs in" in done.stderr


def test_a_failing_job_does_not_stop_the_sweep(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H02, H04, H15: the others run, the table names it, the exit code is 1, its run is not a success."""
    assert call(*SMALL, "dataset.bad='crash','nan',''", multirun=True) == 1
    table = capsys.readouterr().err.split("jobs in")[1]
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["failed", "failed", "done"]
    assert "the plug-in's own mistake" in table
    failed = [folder for folder in house.runs() if read_run(folder)["state"] == "failed"]
    assert len(failed) == 2
    assert "RuntimeError" in "".join((folder / "log.txt").read_text() for folder in failed)


def test_a_finished_sweep_is_kept(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """H08: the same command again skips what is done and says so; files keep time and content."""
    options = (*SMALL, "optimizer=ggn,sgd")
    assert call(*options, multirun=True) == 0
    before = house.files()
    stamps = {path: path.stat().st_mtime_ns for folder in house.runs() for path in folder.rglob("*.*")}
    assert call(*options, multirun=True) == 0
    assert "kept: 2 of 2 jobs" in capsys.readouterr().err
    assert house.files() == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_names_of_jobs_are_short_and_safe(call: Call, house: House) -> None:
    """H32: many overrides, a path and odd characters; all of them stand in run.json."""
    odd = [
        *SMALL,
        "warm_start.sweep='a b/../c','d/e'",
        *(f"scale.{key}=8" for key in ("depth", "limit")),
    ]
    assert call(*odd, multirun=True) == 0
    for folder in house.runs():
        assert len(folder.name) <= 70
        assert "/" not in folder.parent.name
        assert folder.parent.parent == house.root / "outputs" / "sweeps"
        recorded = [entry.replace("'", "") for entry in read_run(folder)["overrides"]]
        assert {"warm_start.sweep=a b/../c", "warm_start.sweep=d/e"} & set(recorded)


@pytest.mark.parametrize(("optimizer", "deterministic"), [("ggn", "false"), ("sgd", "true")])
def test_two_runs_are_identical(call: Call, house: House, optimizer: str, deterministic: str) -> None:
    """T14, T10: bit for bit on the CPU, with and without the option, dropout and shuffling included."""
    options = (
        *SMALL,
        "model.dropout=0.5",
        f"optimizer={optimizer}",
        f"trainer.deterministic={deterministic}",
    )
    assert call(*options) == 0
    torch.rand(5)
    assert call(*options) == 0
    assert call(*options, "seed=1") == 0
    by_seed = {0: [], 1: []}
    for folder in house.runs():
        by_seed[read_run(folder)["seed"]].append(losses(folder))
    assert by_seed[0][0] == by_seed[0][1]
    assert by_seed[0][0] != by_seed[1][0]


def test_a_diverging_run_has_its_own_state_and_code(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """T03: stopped at once, recorded up to there, no checkpoint of broken weights."""
    assert call(*SMALL, "optimizer=sgd", "optimizer.lr=1e6", "trainer.epochs=50") == 3
    (folder,) = house.runs()
    run = read_run(folder)
    assert run["state"] == "diverged"
    assert run["error"]["type"] == "Diverged"
    assert len(read_rows(folder)) < 50
    assert "diverged" in capsys.readouterr().err
    last = folder / "checkpoints" / "last.pt"
    if last.exists():
        state = torch.load(last)["model"]
        assert all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.filterwarnings("ignore:GramGaussNewton. a residual")
def test_a_nan_network_moves_nothing(call: Call, house: House) -> None:
    """T03, G04: the first loss is not finite: no step, no checkpoint, diverged."""
    for optimizer in ("ggn", "sgd"):
        assert call(*SMALL, f"optimizer={optimizer}", "model.outputs='nan'") == 3
    for folder in house.runs():
        (row,) = read_rows(folder)
        assert row["train_loss"] in ("nan", "inf")
        assert not (folder / "checkpoints").exists()


def test_train_s_is_training_only(call: Call, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """T04: sleep in the evaluation leaves it alone; in the batches it counts, as documented."""
    from gramgn.training import TensorData

    batch = TensorData.batch
    delays = {"train": 0.0, "val": 0.2, "test": 0.2}

    def slow_batch(self: TensorData, split: str, *arguments: Any) -> Any:
        time.sleep(delays[split])
        return batch(self, split, *arguments)

    monkeypatch.setattr(TensorData, "batch", slow_batch)
    assert call(*SMALL, "optimizer=sgd") == 0
    delays["train"] = 0.15
    assert call(*SMALL, "optimizer=sgd", "seed=1") == 0
    for folder in house.runs():
        seconds = read_run(folder)["time"]
        assert seconds["eval_s"] >= 0.8
        assert (seconds["train_s"] >= 0.6) == (read_run(folder)["seed"] == 1)
        parts = sum(value for name, value in seconds.items() if name != "wall_s")
        assert parts == pytest.approx(seconds["wall_s"], rel=0.02, abs=0.05)


def test_mae_is_in_the_units_of_the_data(call: Call, house: House) -> None:
    """T09: with a network that stays at zero it is the mean absolute deviation of the raw labels."""
    import numpy as np
    from outside import Blobs

    assert call(*SMALL, "optimizer=sgd", "optimizer.lr=0.0", "model._target_=outside.Zero") == 0
    (folder,) = house.runs()
    data = Blobs().load(16)
    train, test = data.targets[data.split == "train"], data.targets[data.split == "test"]
    row = read_rows(folder)[-1]
    assert float(row["test_mae"]) == pytest.approx(np.abs(test - train.mean()).mean(), rel=1e-6)
    assert float(row["train_mae"]) == pytest.approx(np.abs(train - train.mean()).mean(), rel=1e-6)
    assert read_run(folder)["dataset"]["unit"] == "pixels"
    assert read_run(folder)["scaling"]["target_mean"] == pytest.approx(train.mean())


@pytest.mark.parametrize(("model", "optimizer"), [("resnet_fixup", "ggn"), ("resnet_bn", "sgd")])
def test_a_last_batch_of_one(call: Call, house: House, model: str, optimizer: str) -> None:
    """G05: 48 samples in batches of 47: GGN uses the last one, batch statistics skip and count it."""
    options = [entry for entry in SMALL if not entry.startswith("model")]
    assert call(*options, f"model={model}", f"optimizer={optimizer}", "trainer.batch_size=47") == 0
    (folder,) = house.runs()
    skipped = "1" if optimizer == "sgd" else "0"
    assert [row["skipped_batches"] for row in read_rows(folder)] == [skipped, skipped]


@pytest.mark.parametrize("batch_size", ["full", "1000"])
def test_full_batches_and_cyclic_order(call: Call, house: House, batch_size: str) -> None:
    assert call(*SMALL, f"trainer.batch_size={batch_size}", "trainer.order=cyclic") == 0
    (folder,) = house.runs()
    assert [row["step"] for row in read_rows(folder)] == ["1", "2"]
    # Both conventions are recorded for the actual b.
    assert read_run(folder)["optimizer"]["alpha_sum"] == pytest.approx(48 * 0.3)
    assert read_run(folder)["optimizer"]["alpha_mean"] == pytest.approx(0.3)


def test_float64_and_sparse_evaluation(call: Call, house: House) -> None:
    options = ("trainer.dtype=float64", "trainer.epochs=3", "trainer.eval_every=2", "trainer.eval_train=true")
    assert call(*SMALL, *options) == 0
    (folder,) = house.runs()
    assert [row["val_loss"] != "" for row in read_rows(folder)] == [False, True, True]
    assert [row["train_eval_loss"] != "" for row in read_rows(folder)] == [False, True, True]
    state = torch.load(folder / "checkpoints" / "last.pt")["model"]
    assert {value.dtype for value in state.values()} == {torch.float64}


def test_best_is_chosen_by_validation(call: Call, house: House) -> None:
    """G12: both series are recorded, and the best epoch is the one with the lowest validation loss."""
    assert call(*SMALL, "trainer.epochs=6") == 0
    (folder,) = house.runs()
    rows = read_rows(folder)
    best = min(rows, key=lambda row: float(row["val_loss"]))
    assert read_run(folder)["best"]["epoch"] == int(best["epoch"])
    assert torch.load(folder / "checkpoints" / "best.pt")["epoch"] == int(best["epoch"])


def test_a_warm_start_begins_with_the_last_weights(call: Call, house: House) -> None:
    assert call(*SMALL) == 0
    (first,) = house.runs()
    assert call(*SMALL, "optimizer=sgd", "optimizer.lr=0.0", f"init_from={first}") == 0
    second = next(folder for folder in house.runs() if folder != first)
    for name, value in torch.load(first / "checkpoints" / "last.pt")["model"].items():
        assert torch.equal(value, torch.load(second / "checkpoints" / "last.pt")["model"][name])
    assert read_run(second)["init_from"] == str(first.relative_to(house.root))


def test_no_path_or_host_of_this_machine_is_recorded(call: Call, house: House) -> None:
    """run.json has no path of the user; what a resume needs is in local.json, which is never uploaded."""
    small = [entry for entry in SMALL if not entry.startswith(("dataset", "model"))]
    outside = house.root.parent / "elsewhere" / "hands"
    options = (*small, "model=resnet_fixup", "dataset=rsna_synthetic", f"dataset.root={outside}")
    assert call(*options) == 0
    (folder,) = house.runs()
    text = (folder / "run.json").read_text()
    assert str(house.root.parent) not in text
    assert str(Path.home()) not in text
    assert call(f"resume={folder}", "trainer.epochs=3") == 0
    assert len(read_rows(folder)) == 3


def test_works_from_any_folder(house: House, tmp_path: Path) -> None:
    """H14: relative paths are below the repository, wherever the command is given."""
    options = ("dataset=rsna_synthetic", "trainer=debug", "tracking=none")
    done = house.run(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = house.runs("outputs/runs")
    assert read_run(folder)["state"] == "done"
    assert (house.root / "data" / "raw" / "rsna_synthetic").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["house"]


def test_help_and_cfg_import_no_torch(house: House) -> None:
    """Start-up: --help and --cfg job answer without torch; H30: importing train touches no CUDA."""
    for flag in (["--help"], ["--cfg", "job"]):
        code = (
            f"import sys, runpy; sys.argv = ['train.py', *{flag!r}]\n"
            "try:\n    runpy.run_path('train.py', run_name='__main__')\n"
            "except SystemExit as end:\n    assert not end.code, end.code\n"
            "assert 'torch' not in sys.modules and 'pandas' not in sys.modules and 'wandb' not in sys.modules"
        )
        done = house.script("-c", code)
        assert done.returncode == 0, done.stderr
        assert "optimizer" in done.stdout


def test_an_old_account_free_machine_trains_with_tracking_online(house: House) -> None:
    """H05: no key, no terminal: one warning, and the run is done offline."""
    done = house.run(*BLOBS, *SMALL[:3], "tracking=online")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("working offline") == 1
    (folder,) = house.runs()
    assert read_run(folder)["wandb"]["mode"] == "offline"


def test_training_starts_no_worker_processes(repository: Path) -> None:
    """T10, T18: no loader workers and no shared memory: batches come from one array on the device."""
    sources = (repository / "src" / "gramgn" / "training").glob("*.py")
    text = "".join(path.read_text() for path in sources)
    assert "DataLoader" not in text
    assert "multiprocessing" not in text
    assert "num_workers" not in text


def test_memory_is_peak_of_the_job(call: Call, house: House) -> None:
    """T17: the peak is reset at each job's start: a small job after a large one shows a smaller peak."""
    options = [entry for entry in SMALL if not entry.startswith("model")]
    options += ["model=resnet_fixup", "trainer.epochs=1", "dataset.num_images=512"]
    assert call(*options, "trainer.batch_size=384", "trainer.image_size=32") == 0
    assert call(*options, "trainer.batch_size=4", "trainer.image_size=32") == 0
    large, small = (float(read_rows(folder)[0]["peak_mem_mib"]) for folder in house.runs())
    assert small < large


def test_the_documented_objects_are_the_ones_configured() -> None:
    """Paper settings are the defaults: PAPER's table, for each data set and its synthetic version."""
    from hydra import compose, initialize_config_dir

    afad, rsna = (0.3, 0.003), (0.1, 0.01)
    expected = {"afad": afad, "afad_synthetic": afad, "rsna": rsna, "rsna_synthetic": rsna}
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        for dataset, (alpha, lr) in expected.items():
            ggn = compose("train", overrides=[f"dataset={dataset}"])
            assert (ggn.optimizer.lam, ggn.optimizer.alpha) == (1.0, alpha)
            assert ggn.optimizer.damping_convention == "mean"
            assert (ggn.trainer.batch_size, ggn.trainer.image_size, ggn.model.depth) == (128, 64, 32)
            assert ggn.model._target_.endswith("ResNetFixup")
            sgd = compose("train", overrides=[f"dataset={dataset}", "optimizer=sgd"])
            assert (sgd.optimizer.lr, sgd.optimizer.momentum) == (lr, 0.9)
        assert compose("train", overrides=["optimizer.alpha=7"]).optimizer.alpha == 7


@pytest.mark.parametrize("rule", ["optimizer=ggn_lm", "optimizer=ggn"])
def test_epochs_in_which_nothing_moved_are_reported(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    """Adaptive damping and line search: a run "done" whose steps were all given up, alone and in a sweep."""
    search = "optimizer.line_search={max_tries: 1}" if rule == "optimizer=ggn" else "optimizer.lam=1"
    options = (*SMALL, rule, search, "optimizer.alpha=1e-6", "trainer.epochs=2")
    if rule == "optimizer=ggn_lm":
        options += ("optimizer.adaptive_damping.max_alpha=1e-6",)
    note = "in 2 of 2 epochs every step was given up and nothing moved"
    assert call(*options, "optimizer.lr=1e4") == 0
    assert note in capsys.readouterr().err
    (folder,) = house.runs()
    rows = read_rows(folder)
    assert [row["given_up"] for row in rows] == [rows[0]["step"]] * 2
    assert note in (folder / "log.txt").read_text()
    sweep = (*options, "optimizer.lr=1e-3,1e4", "name=idle")
    for _ in range(2):  # the second one keeps both
        assert call(*sweep, multirun=True) == 0
        table = capsys.readouterr().err.rpartition("2 jobs in")[2]
        assert [note in line for line in table.splitlines() if "optimizer.lr" in line] == [False, True]
