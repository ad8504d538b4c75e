"""A run that is stopped, in whatever way, resumes as if it had not been."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from house import BLOBS, SMALL, Call, House, losses, num_rows, read_rows, read_run, stop, wait_until

from gramgn.records import AVERAGE_COLUMNS

ON_REQUEST = ("momentum", *AVERAGE_COLUMNS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.pt")["model"]
    return state


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for row, same in zip(read_rows(one), read_rows(other), strict=True):
        assert [row.get(name) for name in ON_REQUEST] == [same.get(name) for name in ON_REQUEST]
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


@pytest.mark.parametrize("optimizer", ["ggn", "sgd", "adamw", "muon"])
def test_stopping_and_resuming_changes_nothing(call: Call, house: House, optimizer: str) -> None:
    """T02, T11: 1 epoch, then resumed to 3, equals 3 epochs: losses, lr, lam, alpha, weights.

    Kernels in channels last, dropout, a smaller last batch; the optimizer's state is included.
    """
    options = (*SMALL, "model._target_=outside_formats.DeepNet", f"optimizer={optimizer}")
    options += ("model.dropout=0.3", "trainer.batch_size=9")
    assert call(*options, "trainer.epochs=3") == 0
    assert call(*options, "trainer.epochs=1") == 0
    whole, part = house.runs()
    assert call(f"resume={part}", "trainer.epochs=3") == 0
    assert_same_run(whole, part)
    assert [row["epoch"] for row in read_rows(part)] == ["1", "2", "3"]
    assert read_run(part)["resume_count"] == 1
    assert read_run(part)["config"]["trainer"]["epochs"] == 3
    kernel = weights(part)["body.0.weight"]
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert not kernel.is_contiguous()
    assert read_run(part)["precision"]["channels_last"] is True


def test_a_killed_run_continues_bit_for_bit(call: Call, house: House) -> None:
    """H22: GGN killed with -9 in mid-epoch: the records are complete to there, and it resumes exactly."""
    options = (
        "dataset=blobs",
        "dataset.num_images=256",
        "model=resnet_fixup",
        "trainer=debug",
        "tracking=none",
    )
    options += ("optimizer=ggn", "trainer.epochs=4", "trainer.batch_size=8", "trainer.threads=1")
    options += ("schedule=one_cycle", "schedule.alpha=10", "schedule.momentum=0.9", "schedule.every=epoch")
    process = house.start(*BLOBS, *options)
    wait_until(lambda: num_rows(house) == 2, process)
    time.sleep(0.05)  # well into the next epoch, which takes 24 steps
    code, _ = stop(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    (killed,) = house.runs()
    assert read_run(killed)["state"] == "running"
    assert 2 <= len(read_rows(killed)) < 4
    assert call(f"resume={killed}") == 0
    assert read_run(killed)["state"] == "done"
    assert call(*options) == 0
    (whole,) = (folder for folder in house.runs() if folder != killed)
    assert_same_run(whole, killed)


def test_one_process_per_run_and_a_kill_before_the_first_checkpoint(
    call: Call, house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """H22: a second process is rejected; after kill -9 in the first epoch the run begins again in its folder."""
    process = house.start(*BLOBS, *SMALL, "optimizer=slow_sgd", "optimizer.sleep_s=30")
    wait_until(lambda: bool(house.runs()), process)
    (folder,) = house.runs()
    assert call(f"resume={folder}") == 2
    assert "another process is writing the run" in capsys.readouterr().err
    stop(process, signal.SIGKILL)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert call(f"resume={folder}") == 0
    assert "from the start" in capsys.readouterr().err
    assert len(read_rows(folder)) == 2


ALL_CHANGES = ("schedule=cosine", "schedule.warmup=0.1", "augment=flip", "trainer.average_decay=0.8")


@pytest.mark.parametrize(
    ("how", "code", "changes"), [(signal.SIGTERM, 143, ()), (signal.SIGINT, 130, ALL_CHANGES)]
)
def test_a_signal_saves_mid_epoch_and_nothing_is_lost(
    call: Call,
    house: House,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
    code: int,
    changes: tuple[str, ...],
) -> None:
    """H21: exit code, state, a checkpoint in mid-epoch, and the same run in the end.

    Schedule, augmentation and averaged weights continue in mid-epoch as well.
    """
    options = (*SMALL, "optimizer=slow_sgd", "trainer.batch_size=8", "trainer.epochs=3", "trainer.threads=1")
    options += changes
    process = house.start(*BLOBS, *options, "optimizer.sleep_s=0.1")
    wait_until(lambda: num_rows(house) == 1, process)
    time.sleep(0.25)  # two of the next epoch's six steps
    got, err = stop(process, how)
    assert got == code, err
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "interrupted"
    saved = torch.load(folder / "checkpoints" / "last.pt")
    assert saved["epoch"] == 1
    assert 0 < saved["batch"] < 6
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert call(f"resume={folder}") == 0
    assert call(*options) == 0
    (whole,) = (other for other in house.runs() if other != folder)
    assert_same_run(whole, folder)


def test_the_wandb_run_is_resumed_under_its_id(call: Call, house: House) -> None:
    """H24: run.json keeps the id over a resume."""
    options = ("dataset=blobs", "model=tiny", "trainer=debug")
    assert call(*options, "trainer.epochs=1") == 0
    (folder,) = house.runs()
    before = read_run(folder)["wandb"]["id"]
    assert call(f"resume={folder}", "trainer.epochs=2") == 0
    assert read_run(folder)["wandb"]["id"] == before
    names = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert len(names) == 2
    # W&B adds a number to the second of two that begin in the same second.
    assert all(f"-{before}" in name for name in names)


def test_only_what_may_change_can_be_given(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SMALL) == 0
    (folder,) = house.runs()
    before = house.files()
    assert call(f"resume={folder}", "optimizer.lam=2", "seed=3") == 2
    assert "optimizer.lam, seed cannot be given" in capsys.readouterr().err
    assert house.files() == before


def test_a_schedule_fixes_the_length(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is left of lr at its end."""
    assert call(*SMALL, "schedule=linear") == 0
    (folder,) = house.runs()
    before = house.files()
    assert call(f"resume={folder}", "trainer.epochs=5") == 2
    assert "stretched over its 2 epochs" in capsys.readouterr().err
    assert house.files() == before
    assert [float(row["lr"]) for row in read_rows(folder)] == pytest.approx([0.75, 0.25])


def test_a_run_of_a_version_without_schedules_resumes(call: Call, house: House) -> None:
    """Its records lack the sections; its checkpoints still belong to it, and it ends the same."""
    options = (*SMALL, "optimizer=ggn")
    assert call(*options, "trainer.epochs=3") == 0
    assert call(*options, "trainer.epochs=1") == 0
    whole, part = house.runs()
    run = read_run(part)
    for section in ("schedule", "augment"):
        del run["config"][section]
    del run["config"]["trainer"]["average_decay"]
    (part / "run.json").write_text(json.dumps(run))
    assert call(f"resume={part}", "trainer.epochs=3") == 0
    assert_same_run(whole, part)


@pytest.mark.parametrize("name", ["nowhere", "data"])
def test_a_folder_that_is_no_run(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert call(f"resume={name}") == 2
    assert str(house.root / name) in capsys.readouterr().err
    assert not (house.root / "nowhere").exists()


def test_a_finished_run_has_nothing_to_do(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SMALL) == 0
    (folder,) = house.runs()
    before = house.files()
    for fewer in ((), ("trainer.epochs=1",)):
        assert call(f"resume={folder}", *fewer) == 0
        assert "all 2 epochs of this run are done" in capsys.readouterr().err
        assert house.files() == before


def test_a_diverged_run_is_not_resumed(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "optimizer=sgd", "optimizer.lr=1e30") == 3
    (folder,) = house.runs()
    assert call(f"resume={folder}") == 2
    assert "diverged" in capsys.readouterr().err


def test_a_broken_last_checkpoint_costs_one_epoch(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """T06: last.pt truncated by hand: the previous one is used, said, and the run ends the same."""
    options = (*SMALL, "optimizer=ggn", "trainer.epochs=3")
    assert call(*options) == 0
    assert call(*options) == 0
    whole, broken = house.runs()
    last = broken / "checkpoints" / "last.pt"
    content = last.read_bytes()
    last.unlink()
    last.write_bytes(content[:1000])
    for folder in (whole, broken):
        assert call(f"resume={folder}", "trainer.epochs=4") == 0
    assert "epoch 2) instead" in capsys.readouterr().err
    assert_same_run(whole, broken)


def test_a_best_checkpoint_that_is_gone_is_noted(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SMALL, "trainer.epochs=1") == 0
    (folder,) = house.runs()
    (folder / "checkpoints" / "best.pt").unlink()
    assert call(f"resume={folder}", "trainer.epochs=2") == 0
    assert "note: best.pt (epoch 1) is gone" in capsys.readouterr().err


def test_other_data_is_noticed(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is not resumed with another data set under the same name."""
    assert call(*SMALL) == 0
    (folder,) = house.runs()
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"seed": 0,\n      "bad"', '"seed": 5,\n      "bad"'))
    before = {name: content for name, content in house.files().items() if not name.endswith("log.txt")}
    assert call(f"resume={folder}", "trainer.epochs=3") == 2
    assert "is not the one this run began with" in capsys.readouterr().err
    assert {
        name: content for name, content in house.files().items() if not name.endswith("log.txt")
    } == before


def finished(call: Call, house: House, *options: str) -> Path:
    kept = [entry for entry in SMALL if entry.split("=")[0] not in {o.split("=")[0] for o in options}]
    assert call(*kept, "trainer.epochs=2", *options) == 0
    return house.runs()[-1]


def test_a_run_whose_checkpoints_are_gone_is_left_alone(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its records are all that is left: they must not be cut away."""
    folder = finished(call, house, "tracking=offline")
    for path in (folder / "checkpoints").iterdir():
        path.unlink()

    def records() -> dict[str, bytes]:
        # W&B's own process still writes its log.
        return {name: content for name, content in house.files().items() if "/logs/" not in name}

    before = records()
    assert call(f"resume={folder}", "trainer.epochs=3") == 2
    assert "the checkpoints are gone" in capsys.readouterr().err
    assert records() == before


def test_records_that_do_not_reach_the_checkpoint(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(call, house)
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text(lines[0] + lines[2])
    assert call(f"resume={folder}", "trainer.epochs=3") == 2
    assert "lacks epoch 1" in capsys.readouterr().err
    assert read_run(folder)["state"] == "done"


def test_anothers_checkpoint_and_an_edited_configuration(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of a run come from the configuration in its run.json, or not at all."""
    one = finished(call, house)
    other = finished(call, house, "seed=1")
    last = one / "checkpoints" / "last.pt"
    own = last.read_bytes()
    last.unlink()
    last.write_bytes((other / "checkpoints" / "last.pt").read_bytes())
    assert call(f"resume={one}", "trainer.epochs=3") == 2
    assert "was not written by this run" in capsys.readouterr().err
    last.write_bytes(own)
    text = (one / "run.json").read_text()
    (one / "run.json").write_text(text.replace('"lam": 1.0', '"lam": 2.0'))
    assert call(f"resume={one}", "trainer.epochs=3") == 2
    assert "run.json was edited" in capsys.readouterr().err
    (one / "run.json").write_text(text)
    assert call(f"resume={one}", "trainer.epochs=3") == 0
    assert len(read_rows(one)) == 3


def test_a_record_without_what_resuming_needs(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(call, house)
    run = read_run(folder)
    wrong = {"id": None, "config": 3.5, "choices": None, "starts": 3.5, "threads": 3.5}
    for entry, value in wrong.items():
        (folder / "run.json").write_text(json.dumps(run | {entry: value}))
        before = house.files()
        assert call(f"resume={folder}", "trainer.epochs=3") == 2
        message = capsys.readouterr().err
        assert f"entry '{entry}'" in message
        assert "Traceback" not in message
        assert house.files() == before


def test_damaged_local_paths(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(call, house)
    for content in ("{", "[1]", '{"foo.bar": "x"}'):
        (folder / "local.json").write_text(content)
        assert call(f"resume={folder}", "trainer.epochs=3") == 2
        assert "local.json is damaged" in capsys.readouterr().err
