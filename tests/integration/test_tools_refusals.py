"""What the tools refuse: one message, exit code 2, nothing written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from house import SMALL, House, read_rows, read_run
from trained_runs import copy_of, rewrite_checkpoint, tool, train, write_scans

TOOLS = {
    "evaluate": (),
    "predict": ("images={scans}", "out={out}/p.csv"),
    "export": ("out={out}/exported",),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("tools") / "house")


@pytest.fixture(scope="module")
def run(house: House) -> Path:
    """Return a run on synthetic images."""
    return train(house, "dataset=rsna_synthetic", "dataset.num_images=60", "model=resnet_gn", *SMALL[2:])


@pytest.fixture
def refused(house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs all three tools on a run and returns their one message."""
    write_scans(tmp_path / "scans", 2)
    (tmp_path / "out").mkdir()

    def check(folder: Path, *extra: str) -> str:
        messages = set()
        before = house.files()
        for name, words in TOOLS.items():
            filled = [word.format(scans=tmp_path / "scans", out=tmp_path / "out") for word in words]
            capsys.readouterr()
            assert tool(house, name, f"run={folder}", *filled, *extra) == 2, name
            told = capsys.readouterr()
            assert told.out == ""
            assert told.err.count("error: ") == 1
            assert "Traceback" not in told.err
            messages.add(told.err)
        assert house.files() == before
        assert list((tmp_path / "out").iterdir()) == []
        (message,) = messages
        return message

    return check


def changed(run: Path, name: str, **entries: Any) -> Path:
    """Return a copy of a run with other entries in its run.json."""
    folder = copy_of(run, name)
    record = read_run(folder) | entries
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "is running or was killed: wait until it has ended, or resume it"),
        ("failed", "failed (the disk is full): fix that"),
        ("diverged", "diverged (the disk is full), so there is no trained network"),
    ],
)
def test_a_run_that_did_not_end_well(run: Path, refused: Callable[..., str], state: str, words: str) -> None:
    error = {"type": "InputError", "message": "the disk is full\nmore"}
    assert words in refused(changed(run, state, state=state, error=error))


def test_a_real_divergence(house: House, refused: Callable[..., str]) -> None:
    folder = train(house, *SMALL, "optimizer=sgd", "optimizer.lr=1e6", "trainer.epochs=50")
    assert "diverged (the loss was not finite" in refused(folder)


def test_no_checkpoint(run: Path, refused: Callable[..., str]) -> None:
    folder = copy_of(run, "bare")
    (folder / "checkpoints" / "best.pt").unlink()
    assert "has no checkpoint 'best' (best.pt): checkpoint=last is there" in refused(folder)
    shutil.rmtree(folder / "checkpoints")
    assert "copy the folder checkpoints/ too" in refused(folder)


def test_a_damaged_checkpoint(run: Path, refused: Callable[..., str]) -> None:
    folder = copy_of(run, "damaged")
    best = folder / "checkpoints" / "best.pt"
    content = best.read_bytes()
    best.unlink()
    best.write_bytes(content[: len(content) // 2])
    message = refused(folder)
    assert "best.pt is damaged" in message
    assert "try checkpoint=last" in message


def test_the_checkpoint_of_another_run(run: Path, refused: Callable[..., str]) -> None:
    assert "was not written by this run" in refused(changed(run, "swapped", id="0" * 16))


def test_a_record_that_was_edited(run: Path, refused: Callable[..., str]) -> None:
    config = read_run(run)["config"]
    assert "has no entry 'config.model._target_'" in refused(
        changed(run, "no-model", config={**config, "model": None})
    )
    assert "has no entry 'dataset'" in refused(changed(run, "no-dataset", dataset=None))
    broken = copy_of(run, "broken")
    (broken / "run.json").write_text('{"format": 1, "state"')
    assert "run.json is damaged" in refused(broken)


def test_folders_that_are_no_run(
    house: House, run: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    gone = tmp_path / "gone"
    assert f"there is no run folder {gone}" in refused(gone)
    assert f"did you mean '{run.name}'?" in refused(run.with_name(run.name[:-1]))
    assert "is not a run folder: it has no run.json" in refused(tmp_path)
    assert "runs; choose one of them: run=" in refused(run.parent)


def test_a_network_that_cannot_be_imported(
    house: House, run: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """A plug-in's class needs PYTHONPATH: without it, and with another class of that name, one message."""
    module = tmp_path / "plugged.py"
    network = (
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, width=3):\n"
        "        super().__init__()\n"
        "        self.last = torch.nn.Linear(3 * 16 * 16, width)\n"
        "    def forward(self, x):\n"
        "        return self.last(x.flatten(1))[:, 0]\n"
    )
    module.write_text(network)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        folder = train(house, "dataset=rsna_synthetic", *SMALL[2:], "model._target_=plugged.Net", *KEYS)
        assert tool(house, "evaluate", f"run={folder}") == 0
        sys.modules.pop("plugged")
    message = refused(folder)
    assert "model._target_=plugged.Net cannot be imported" in message
    assert "PYTHONPATH" in message
    module.write_text(network.replace("self.last", "self.final"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        message = refused(folder)
        sys.modules.pop("plugged")
    assert "do not fit plugged.Net as it is now" in message


# What resnet_fixup's file has and another class has not.
KEYS = ("~model.depth", "~model.width", "~model.in_channels", "~model.zero_last_layer")


def test_data_without_a_decoder(house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A data set that is no ImageDataset is evaluated, but says nothing of image files."""
    folder = train(house, *SMALL)
    assert tool(house, "evaluate", f"run={folder}") == 0
    (scan,) = write_scans(tmp_path / "scans", 1)
    assert tool(house, "predict", f"run={folder}", f"images={scan}", f"out={tmp_path / 'p.csv'}") == 2
    assert "outside.Blobs, does not say how an image file becomes" in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()


LINES = {
    "an unknown key": (["rum=x"], ["there is no 'rum' (did you mean 'run'?)", "Keys: run"]),
    "no key": ([], ["run=<value>", "Example: python scripts/"]),
    "no value": (["run="], ["'run=': write run=<value>"]),
    "a bare word": (["outputs/runs/x"], ["'outputs/runs/x' is not key=value"]),
    "an option": (["--run"], ["'--run' is not key=value", "did you mean 'run'?"]),
    "twice": (["run=a", "run=b"], ["run is given twice: run=a and run=b"]),
}


@pytest.mark.parametrize("name", list(TOOLS))
@pytest.mark.parametrize("case", LINES)
def test_a_wrong_command_line(house: House, capsys: pytest.CaptureFixture[str], case: str, name: str) -> None:
    """H09: unknown, missing and empty keys, with the nearest name and a line that works."""
    words, expected = LINES[case]
    assert tool(house, name, *words) == 2
    message = capsys.readouterr().err
    for text in expected:
        assert text in message
    assert message.count("\n") == 1


def test_wrong_values(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("evaluate", "split=tset"): "split=tset: allowed are test, val, train (did you mean 'test'?)",
        ("evaluate", "checkpoint=newest"): "checkpoint=newest: allowed are best, last",
        ("evaluate", "format=yaml"): "format=yaml: allowed are text, json",
        ("evaluate", "device=tpu"): "error: device='tpu' must be auto, cpu",
        ("export", "checkpoint=beste"): "did you mean 'best'?",
        ("predict", "workers=0"): "workers=0 must be a whole number of at least 1, or auto",
    }
    more = {"evaluate": [], "export": ["out=x"], "predict": ["images=x"]}
    for (name, word), expected in cases.items():
        assert tool(house, name, f"run={run}", word, *more[name]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", list(TOOLS))
def test_help(house: House, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Every key a tool takes is in its help."""
    assert tool(house, name, "--help") == 0
    text = capsys.readouterr().out
    assert f"python scripts/{name}.py run=" in text
    assert tool(house, name, "no=thing") == 2
    keys = capsys.readouterr().err.split("Keys: ")[1].split(". Example")[0].split(", ")
    for key in keys:
        assert f"\n{key} " in text


def test_a_moved_run_is_the_same(
    house: House, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder is used wherever it lies; relative to here, or to the repository."""
    moved = tmp_path / "kept" / "my run"
    shutil.copytree(run, moved)
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for given in ("kept/my run", "kept/my run/run.json", f"outputs/runs/{run.name}"):
            capsys.readouterr()
            assert tool(house, "evaluate", f"run={given}", "format=json") == 0
            results.append(json.loads(capsys.readouterr().out))
    assert {result["loss"] for result in results} == {float(read_rows(run)[-1]["test_loss"])}
    assert {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()} == before


def test_another_machine(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads and device are of the machine that trained: neither keeps the run from being used here."""
    record = read_run(run)
    trainer = record["config"]["trainer"] | {"threads": 100_000, "device": "cuda:7"}
    elsewhere = changed(run, "elsewhere", config=record["config"] | {"trainer": trainer})
    threads = torch.get_num_threads()
    assert tool(house, "evaluate", f"run={elsewhere}") == 0
    assert torch.get_num_threads() == threads


def test_an_interrupted_run_is_used_and_says_so(
    house: House, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool(house, "evaluate", f"run={changed(run, 'stopped', state='interrupted')}") == 0
    told = capsys.readouterr()
    assert "note: this run was interrupted; its checkpoint best (epoch" in told.err
    assert "mae" in told.out


def test_weights_from_the_middle_of_an_epoch(
    house: House, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was measured with them: no number of the epoch before passes for theirs."""
    folder = changed(run, "middle", state="interrupted")
    rewrite_checkpoint(folder, "last.pt", epoch=1, batch=2)
    assert tool(house, "evaluate", f"run={folder}", "checkpoint=last") == 0
    told = capsys.readouterr().out
    assert "last (epoch 1 and 2 batches of 2" in told
    assert "recorded" not in told
    assert tool(house, "export", f"run={folder}", "checkpoint=last", f"out={tmp_path / 'x'}") == 0
    assert "nothing was measured with exactly these weights" in (tmp_path / "x" / "MODEL_CARD.md").read_text()


def test_the_scripts_are_commands(house: House, run: Path, tmp_path: Path) -> None:
    """As a user starts them: from another folder, in a process of their own."""
    write_scans(tmp_path / "scans", 2)
    script = str(house.root / "scripts" / "predict.py")
    done: subprocess.CompletedProcess[str] = house.script(
        script, f"run=outputs/runs/{run.name}", "images=scans", "workers=2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "2 predictions in months, 0 errors: predictions.csv" in done.stdout
    assert "SYNTHETIC" in done.stdout
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 3
