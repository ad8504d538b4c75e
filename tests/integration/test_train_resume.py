"""A run that is stopped, in whatever way, goes on as if it had not been."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from house import BLOBS, SMALL, Call, House, losses, num_rows, read_rows, read_run, stop, wait_until


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.pt")["model"]
    return state


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


@pytest.mark.parametrize("optimizer", ["ggn", "sgd", "adamw"])
def test_stopping_and_resuming_changes_nothing(call: Call, house: House, optimizer: str) -> None:
    """T02, T11: 2 epochs, then resumed to 4, equals 4 epochs: losses, lr, lam, alpha, weights; dropout on."""
    options = (*SMALL, f"optimizer={optimizer}", "model.dropout=0.3", "trainer.batch_size=9")
    assert call(*options, "trainer.epochs=4") == 0
    assert call(*options, "trainer.epochs=2") == 0
    whole, part = house.runs()
    assert call(f"resume={part}", "trainer.epochs=4") == 0
    assert_same_run(whole, part)
    assert [row["epoch"] for row in read_rows(part)] == ["1", "2", "3", "4"]
    assert read_run(part)["resume_count"] == 1
    assert read_run(part)["config"]["trainer"]["epochs"] == 4


def test_a_killed_run_continues_bit_for_bit(house: House) -> None:
    """H22: GGN on synthetic faces, killed with -9 in mid-epoch: complete to there, and resumed exactly."""
    options = ("optimizer=ggn", "dataset=afad_synthetic", "trainer=debug", "trainer.epochs=5")
    options += ("trainer.batch_size=8",)
    assert house.run(*options).returncode == 0
    (whole,) = house.runs()
    whole = whole.rename(house.root / "whole")
    process = house.start(*options)
    wait_until(lambda: num_rows(house) == 2, process)
    time.sleep(0.05)  # well into the next epoch, which takes about 0.2 s
    code, _ = stop(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    (killed,) = house.runs()
    assert read_run(killed)["state"] == "running"
    assert 2 <= len(read_rows(killed)) < 5
    assert house.run(f"resume={killed}").returncode == 0
    assert read_run(killed)["state"] == "done"
    assert_same_run(whole, killed)


def test_a_kill_before_the_first_checkpoint_loses_nothing_else(house: House) -> None:
    """H22: run.json is there from the start, so that the run can begin again in its folder."""
    options = (*BLOBS, *SMALL, "optimizer=slow_sgd", "optimizer.sleep_s=0.2")
    process = house.start(*options)
    wait_until(lambda: bool(house.runs()), process)
    stop(process, signal.SIGKILL)
    (folder,) = house.runs()
    done = house.run(f"resume={folder}")
    assert done.returncode == 0
    assert "from the start" in done.stderr
    assert len(read_rows(folder)) == 2


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_mid_epoch_and_nothing_is_lost(house: House, how: signal.Signals, code: int) -> None:
    """H21: exit code, state, a checkpoint in mid-epoch, and the same run in the end."""
    options = (*BLOBS, *SMALL, "optimizer=slow_sgd", "trainer.batch_size=8", "trainer.epochs=3")
    assert house.run(*options, "optimizer.sleep_s=0.01").returncode == 0
    (whole,) = house.runs()
    whole = whole.rename(house.root / "whole")
    process = house.start(*options, "optimizer.sleep_s=0.1")
    wait_until(lambda: num_rows(house) == 1, process)
    time.sleep(0.25)  # two of the next epoch's six steps
    got, err = stop(process, how)
    assert got == code, err
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "interrupted"
    saved = torch.load(folder / "checkpoints" / "last.pt")
    assert saved["epoch"] == 1
    assert 0 < saved["batch"] < 6
    assert house.run(f"resume={folder}").returncode == 0
    assert_same_run(whole, folder)


def test_the_wandb_run_goes_on_under_its_id(call: Call, house: House) -> None:
    """H24: run.json keeps the id over a resume."""
    options = ("dataset=blobs", "model=tiny", "trainer=debug")
    assert call(*options, "trainer.epochs=1") == 0
    (folder,) = house.runs()
    before = read_run(folder)["wandb"]["id"]
    assert call(f"resume={folder}", "trainer.epochs=2") == 0
    assert read_run(folder)["wandb"]["id"] == before
    names = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert len(names) == 2
    assert all(name.endswith(before) for name in names)


def test_only_what_may_change_can_be_given(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SMALL) == 0
    (folder,) = house.runs()
    before = house.files()
    assert call(f"resume={folder}", "optimizer.lam=2", "seed=3") == 2
    assert "optimizer.lam, seed cannot be given" in capsys.readouterr().err
    assert house.files() == before


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


def test_other_data_is_noticed(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run does not go on with another data set under the same name."""
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


def test_two_processes_cannot_write_one_run(house: House) -> None:
    options = (*BLOBS, *SMALL, "optimizer=slow_sgd", "optimizer.sleep_s=0.3")
    process = house.start(*options, "trainer.epochs=50")
    wait_until(lambda: num_rows(house) == 1, process)
    (folder,) = house.runs()
    second = house.run(f"resume={folder}")
    assert second.returncode == 2
    assert "another process is writing the run" in second.stderr
    code, err = stop(process, signal.SIGTERM)
    assert code == 143, err


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
    before = house.files()
    assert call(f"resume={folder}", "trainer.epochs=3") == 2
    assert "the checkpoints are gone" in capsys.readouterr().err
    assert house.files() == before


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


@pytest.mark.parametrize("entry", ["id", "config", "choices", "starts", "threads"])
@pytest.mark.parametrize("value", [None, 3.5])
def test_a_record_without_what_resuming_needs(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], entry: str, value: object
) -> None:
    folder = finished(call, house)
    run = read_run(folder) | {entry: value}
    (folder / "run.json").write_text(json.dumps(run))
    before = house.files()
    assert call(f"resume={folder}", "trainer.epochs=3") == 2
    message = capsys.readouterr().err
    assert f"entry '{entry}'" in message
    assert "Traceback" not in message
    assert house.files() == before


@pytest.mark.parametrize("content", ["{", "[1]", '{"foo.bar": "x"}'])
def test_damaged_local_paths(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    folder = finished(call, house)
    (folder / "local.json").write_text(content)
    assert call(f"resume={folder}", "trainer.epochs=3") == 2
    assert "local.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(house: House, how: signal.Signals) -> None:
    """H21: while worker processes draw, twice in a row: no waiting, no process left, the right code."""
    options = ("dataset=afad_synthetic", "trainer=debug", "tracking=none", "dataset.workers=2")
    process = house.start(*options, "dataset.num_images=4000", "dataset.limit=null")
    raw = house.root / "data" / "raw"
    wait_until(lambda: len(list(raw.rglob("*.jpg"))) > 50, process)
    process.send_signal(how)
    time.sleep(0.05)
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + how
    assert "Traceback" not in err
    assert house.run("dataset=afad_synthetic", "trainer=debug", "tracking=none").returncode == 0
