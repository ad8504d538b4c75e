"""scripts/export.py: weights alone, and a card whose snippet gives what predict.py gives."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from data_cases import snapshot, write_afad, write_kaggle
from house import BLOBS, PLUGIN, SMALL, House, read_rows, read_run
from trained_runs import SMALL_NET, copy_of, in_house, rewrite_checkpoint, tool, train, write_scans

from gramgn.app import train_command
from gramgn.records import checkpoint_identity


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """Return a house with raw data of both real layouts and some images."""
    house = House(tmp_path_factory.mktemp("tools") / "house")
    write_afad(house.root / "data" / "raw" / "afad" / "AFAD-Lite", 60)
    write_kaggle(house.root / "data" / "raw" / "rsna", 60)
    write_scans(house.root / "data" / "raw" / "rotation", 60)
    return house


@pytest.fixture(scope="module")
def faces(house: House) -> Path:
    return train(house, "dataset=afad", *SMALL_NET)


def card_of(out: Path) -> str:
    return (out / "MODEL_CARD.md").read_text(encoding="utf-8")


def snippet_of(out: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card_of(out), re.DOTALL)
    return code


SNIPPETS = {
    "colour faces": ("dataset=afad", *SMALL_NET),
    "faces in grey, cut": ("dataset=afad", "dataset.channels=1", "dataset.resize=crop", *SMALL_NET),
    "grey three times, padded, float64": (
        "dataset=rsna",
        "dataset.resize=pad",
        "trainer.dtype=float64",
        *SMALL_NET,
    ),
    "turned": ("dataset=rotation", *SMALL_NET),
    "Fixup and GGN": ("dataset=rsna", "trainer=debug", "tracking=none"),
    "synthetic": ("dataset=rsna_synthetic", "dataset.num_images=60", *SMALL_NET),
    "raw targets": ("dataset=rsna", "trainer.standardize_targets=false", "optimizer.lr=1e-6", *SMALL_NET),
}


@pytest.mark.parametrize("case", SNIPPETS)
def test_the_snippet_of_the_card_predicts(
    house: House,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    """As it stands in the card, in the exported folder, with the package alone; equal to predict.py."""
    run = train(house, *SNIPPETS[case])
    out = tmp_path / "exported"
    assert tool(house, "export", f"run={run}", f"out={out}") == 0
    assert sorted(path.name for path in out.iterdir()) == ["MODEL_CARD.md", "weights.pt"]
    scan = write_scans(tmp_path / "scans", 1)[0]
    shutil.copy(scan, out / "image.png")
    monkeypatch.chdir(out)
    names: dict[str, float] = {}
    exec(compile(snippet_of(out), "MODEL_CARD.md", "exec"), names)
    assert tool(house, "predict", f"run={run}", "images=image.png", f"out={tmp_path / 'p.csv'}") == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    rounding = 1e-5 * read_run(run)["scaling"]["target_std"]
    assert names["prediction"] == pytest.approx(float(row["prediction"]), rel=1e-5, abs=rounding)
    assert read_run(run)["dataset"]["unit"] in capsys.readouterr().out
    if case == "synthetic":
        card = card_of(out)
        assert card.splitlines()[0] == "# resnet_gn on rsna_synthetic (SYNTHETIC images)"
        assert "say nothing about real images" in card
        assert "non-commercial" not in card


def test_the_weights_are_weights(house: House, faces: Path, tmp_path: Path) -> None:
    """A plain dictionary of contiguous tensors on the CPU, those of the checkpoint that was asked for."""
    for checkpoint in ("best", "last"):
        out = tmp_path / checkpoint
        assert tool(house, "export", f"run={faces}", f"out={out}", f"checkpoint={checkpoint}") == 0
        weights = torch.load(out / "weights.pt", weights_only=True)
        expected = torch.load(faces / "checkpoints" / f"{checkpoint}.pt", weights_only=True)["model"]
        assert type(weights) is dict
        assert list(weights) == list(expected)
        for name, value in weights.items():
            assert torch.equal(value, expected[name])
            assert value.is_contiguous()
            assert (value.device.type, value.requires_grad) == ("cpu", False)


def test_the_card_says_what_it_is(house: House, faces: Path, tmp_path: Path) -> None:
    """Data, numbers of the checkpoint, terms; no path of this machine."""
    out = tmp_path / "exported"
    assert tool(house, "export", f"run={faces}", f"out={out}") == 0
    card, record = card_of(out), read_run(faces)
    row = read_rows(faces)[record["best"]["epoch"] - 1]
    for words in (
        "afad (real)",
        record["dataset"]["manifest_sha256"],
        f"| test | {float(row['test_loss']):.5g} | {float(row['test_mae']):.5g} |",
        "academic research only",
        "Apache-2.0",
        "years",
        str(record["git"]["commit"]),
        "resnet_gn",
    ):
        assert words in card
    assert "synthetic" not in card.lower()
    assert str(house.root.parent) not in card
    assert str(Path.home()) not in card


def test_the_terms_of_a_warm_start_are_named(house: House, faces: Path, tmp_path: Path) -> None:
    """Radiographs that started from faces carry the terms of both; and say so where the first run is gone."""
    run = train(house, "dataset=rsna", *SMALL_NET, f"init_from={faces}")
    assert tool(house, "export", f"run={run}", f"out={tmp_path / 'x'}") == 0
    assert "- started from weights trained on afad (real); its terms hold too" in card_of(tmp_path / "x")
    assert "non-commercial" in card_of(tmp_path / "x")
    orphan = copy_of(run, "orphan")
    record = read_run(orphan)
    record["config"]["init_from"] = "outputs/runs/gone"
    (orphan / "run.json").write_text(json.dumps(record))
    for name in ("best.pt", "last.pt"):
        rewrite_checkpoint(orphan, name, identity=checkpoint_identity(record))
    assert tool(house, "export", f"run={orphan}", f"out={tmp_path / 'y'}") == 0
    assert "a run whose record is not here" in card_of(tmp_path / "y")


def test_nothing_is_overwritten(
    house: House, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with anything in it, a file, a link, a second export: left as they are, exit 2."""
    full, file, link, empty = (tmp_path / name for name in ("full", "file", "link", "empty"))
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    before = snapshot(tmp_path)
    for out in (full, file, link):
        assert tool(house, "export", f"run={faces}", f"out={out}") == 2
        assert "an export never overwrites" in capsys.readouterr().err
    assert snapshot(tmp_path) == before
    assert tool(house, "export", f"run={faces}", f"out={file / 'inside'}") == 2
    assert "Nothing was written; choose another folder" in capsys.readouterr().err
    assert snapshot(tmp_path) == before
    empty.mkdir()
    assert tool(house, "export", f"run={faces}", f"out={empty}") == 0
    once = snapshot(tmp_path)
    assert tool(house, "export", f"run={faces}", f"out={empty}") == 2
    assert snapshot(tmp_path) == once


def test_a_plugged_in_network_and_data_set(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippet imports the user's own class; pixels are theirs to make."""
    run = train(house, *SMALL)
    out = tmp_path / "exported"
    assert tool(house, "export", f"run={run}", f"out={out}") == 0
    code = snippet_of(out)
    assert "outside.TinyNet" in code
    assert "zeros take its place" in code
    monkeypatch.chdir(out)
    monkeypatch.syspath_prepend(str(PLUGIN))
    names: dict[str, float] = {}
    exec(compile(code, "MODEL_CARD.md", "exec"), names)
    assert isinstance(names["prediction"], float)
    card = card_of(out)
    assert "- blobs: user-defined data set; its terms are those of its owner" in card
    assert "blobs (synthetic), 48 train, 8 val, 8 test" in card
    assert "With the same `--config-dir` and `PYTHONPATH`" in card
    assert f"trainer.epochs={read_run(run)['config']['trainer']['epochs']}" not in card


def test_the_command_of_a_resumed_run(house: House, tmp_path: Path) -> None:
    """It states the epochs that the run has in the end, once."""
    run = train(house, *SMALL, "trainer.epochs=1")
    with in_house(house) as patch:
        patch.setattr(sys, "argv", sys.argv)
        assert train_command([*BLOBS, f"resume={run}", "trainer.epochs=2"], house.root) == 0
    assert tool(house, "export", f"run={run}", f"out={tmp_path / 'exported'}") == 0
    (command,) = re.findall(r"^    python train.py (.*)$", card_of(tmp_path / "exported"), re.MULTILINE)
    assert re.findall(r"trainer\.epochs=\d", command) == ["trainer.epochs=2"]
