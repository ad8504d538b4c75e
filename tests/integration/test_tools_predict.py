"""scripts/evaluate.py and scripts/predict.py: the same numbers as in training, from the run's folder alone."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import write_afad, write_kaggle
from house import House, read_rows, read_run
from PIL import Image
from trained_runs import SMALL_NET, tool, train, write_scans

from gramgn.data import Item, Rotation
from gramgn.training import TensorData


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """Return a house with raw data in two real layouts: colour faces and grey radiographs of odd shapes."""
    house = House(tmp_path_factory.mktemp("tools") / "house")
    write_afad(house.root / "data" / "raw" / "afad" / "AFAD-Lite", 60)
    write_kaggle(house.root / "data" / "raw" / "rsna", 80)
    return house


@pytest.fixture(scope="module")
def faces(house: House) -> Path:
    """Return a run on colour faces, four epochs long, of a network that behaves otherwise while it trains."""
    return train(
        house,
        "dataset=afad",
        "model=resnet_bn",
        *SMALL_NET[1:],
        "trainer.epochs=4",
        "trainer.average_decay=0.7",
    )


def predictions(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def manifest(house: House, run: Path, split: str) -> list[dict[str, str]]:
    """Return the rows of a split in the manifest of a run's prepared set."""
    folder = house.root / "data" / "prepared" / read_run(run)["dataset"]["summary"]["prepared"]
    with (folder / "manifest.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["split"] == split]


def evaluated(house: House, run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert tool(house, "evaluate", f"run={run}", "format=json", *words) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


CASES = [
    ("afad", 3, "stretch"),
    ("afad", 3, "pad"),
    ("afad", 1, "crop"),
    ("rsna", 3, "crop"),
    ("rsna", 1, "stretch"),
    ("rsna", 1, "pad"),
]


@pytest.mark.parametrize(("dataset", "channels", "resize"), CASES)
def test_a_prediction_is_what_evaluation_gives(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: str, channels: int, resize: str
) -> None:
    """Pixels, channels and scaler are those of the training: loss and mae of the CSV are those recorded."""
    options = (f"dataset={dataset}", f"dataset.channels={channels}", f"dataset.resize={resize}")
    run = train(house, *options, *SMALL_NET, "trainer.epochs=1")
    rows = manifest(house, run, "test")
    root = house.root / "data" / "raw" / dataset
    out = tmp_path / "predictions.csv"
    words = [f"images={root / row['path']}" for row in rows]
    assert tool(house, "predict", f"run={run}", *words, f"out={out}") == 0
    found = predictions(out)
    assert [row["path"] for row in found] == [str(root / row["path"]) for row in rows]
    assert {row["unit"] for row in found} == {{"afad": "years", "rsna": "months"}[dataset]}
    assert {row["error"] for row in found} == {""}

    errors = [
        float(given["prediction"]) - float(row["target"]) for given, row in zip(found, rows, strict=True)
    ]
    result = evaluated(house, run, capsys, "split=test")
    assert result["n"] == len(rows) > 3
    assert np.mean(np.abs(errors)) == pytest.approx(result["mae"], rel=1e-6)
    std = read_run(run)["scaling"]["target_std"]
    assert np.mean(np.square(errors)) / std**2 == pytest.approx(result["loss"], rel=1e-5)
    # A network that says the same of every image would hide a wrong image.
    assert np.ptp([float(row["prediction"]) for row in found]) > 1e-3 * std
    last = read_rows(run)[-1]
    assert (result["loss"], result["mae"]) == (float(last["test_loss"]), float(last["test_mae"]))


def test_the_network_sees_the_same_tensor(house: House) -> None:
    """Bit for bit: what a prediction feeds the network is what TensorData feeds it in training."""
    from gramgn.app import load_trained, open_run

    run = train(house, "dataset=rsna", "dataset.resize=pad", *SMALL_NET, "trainer.epochs=1")
    trained = load_trained(open_run(str(run)))
    loaded = trained.dataset().load(16)
    data = TensorData(
        loaded.images,
        loaded.targets,
        loaded.split,
        channels=3,
        device=torch.device("cpu"),
        dtype=torch.float32,
        standardize_targets=True,
    )
    data.memory_format = torch.channels_last
    expected, _ = data.batch("test", slice(0, 4))
    given = trained.inputs(loaded.images[loaded.split == "test"][:4], 3)
    assert torch.equal(given, expected)
    assert given.stride() == expected.stride()


def test_the_range_of_16_bit_grey_is_the_trainings(house: House, tmp_path: Path) -> None:
    """Without it a 12-bit radiograph would be nearly black for the network."""
    raw = house.root / "data" / "raw" / "deep"
    rng = np.random.default_rng(0)
    raw.mkdir()
    for number in range(20):
        Image.fromarray(rng.integers(0, 4096, (24, 24), np.uint16)).save(raw / f"{number}.png")
    options = ("dataset=rotation", f"dataset.root={raw}", "dataset.grey_range=[0,4095]")
    run = train(house, *options, *SMALL_NET, "trainer.epochs=1")
    decode = Rotation(raw, channels=3, grey_range=(0, 4095)).decoder(16)
    from gramgn.app import load_trained, open_run

    trained = load_trained(open_run(str(run)))
    expected = float(trained.predict(decode(Item("", "3.png", 0.0)).pixels[None], 3)[0])
    out = tmp_path / "p.csv"
    assert tool(house, "predict", f"run={run}", f"images={raw / '3.png'}", f"out={out}") == 0
    assert float(predictions(out)[0]["prediction"]) == pytest.approx(expected, rel=1e-6)


def test_a_colour_image_is_seen_as_the_originals_were(house: House, tmp_path: Path) -> None:
    """D07: where grey is stored and repeated three times, a colour image becomes grey first."""
    run = train(house, "dataset=rsna", "dataset.channels=3", *SMALL_NET, "trainer.epochs=1")
    (scan,) = write_scans(tmp_path / "scans", 1)
    with Image.open(scan) as image:
        assert image.mode == "RGB"
        image.convert("L").save(tmp_path / "scans" / "grey.png")
    out = tmp_path / "p.csv"
    assert tool(house, "predict", f"run={run}", f"images={tmp_path / 'scans'}", f"out={out}") == 0
    values = [float(row["prediction"]) for row in predictions(out)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_a_turned_image_is_predicted_as_it_is(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rotation: an image is masked to the disk like the training's, and not turned any further."""
    from gramgn.app import load_trained, open_run
    from gramgn.data import Item, Rotation

    root = house.root / "data" / "raw" / "rotation"
    write_scans(root, 60)
    run = train(house, "dataset=rotation", *SMALL_NET, "trainer.epochs=1")
    out = tmp_path / "angles.csv"
    assert tool(house, "predict", f"run={run}", f"images={root}", f"out={out}") == 0
    found = predictions(out)
    assert len(found) == 60
    assert {row["unit"] for row in found} == {"degrees"}
    pixels = Rotation(root).decoder(16)(Item("", "scan-0.png", 0.0)).pixels
    assert pixels[:, 0, 0].max() == 0
    trained = load_trained(open_run(str(run)))
    assert float(found[0]["prediction"]) == pytest.approx(
        trained.predict(pixels[None], 3)[0], rel=1e-5, abs=1e-4
    )
    assert evaluated(house, run, capsys)["loss"] == float(read_rows(run)[-1]["test_loss"])


def test_arrays_are_predicted_too(house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RetinaMNIST is one .npz file: the images of its test split give the recorded loss."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, num in {"train": 40, "val": 8, "test": 9}.items():
        arrays[f"{split}_images"] = rng.integers(0, 256, (num, 28, 28, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(num) % 5
    path = house.root / "data" / "raw" / "retinamnist" / "retinamnist.npz"
    path.parent.mkdir()
    np.savez(path, **arrays)
    run = train(house, "dataset=retinamnist", *SMALL_NET, "trainer.epochs=1", "scale.limit=null")
    out = tmp_path / "grades.csv"
    assert tool(house, "predict", f"run={run}", f"images={path}", f"out={out}") == 0
    found = predictions(out)
    assert len(found) == 57
    tested = [float(row["prediction"]) for row in found if "#test_images/" in row["path"]]
    mae = np.mean(np.abs(np.array(tested) - arrays["test_labels"]))
    assert mae == pytest.approx(evaluated(house, run, capsys)["mae"], rel=1e-6)


def test_each_checkpoint_has_its_own_numbers(
    house: House, faces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Best and last are the epochs they say, on every split."""
    best = read_run(faces)["best"]["epoch"]
    for checkpoint, epoch in (("best", best), ("last", 4)):
        row = read_rows(faces)[epoch - 1]
        for split in ("val", "test"):
            result = evaluated(house, faces, capsys, f"split={split}", f"checkpoint={checkpoint}")
            assert result["loss"] == float(row[f"{split}_loss"])
            assert result["recorded"] == [float(row[f"{split}_loss"]), float(row[f"{split}_mae"])]
            assert result["epoch"] == epoch
    assert evaluated(house, faces, capsys, "split=train")["n"] > 30
    average = evaluated(house, faces, capsys, "checkpoint=average")
    assert average["loss"] == average["recorded"][0] == float(row["average_test_loss"])
    assert average["loss"] != float(row["test_loss"])


def test_a_run_without_averaged_weights(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(house, "dataset=rsna", *SMALL_NET, "trainer.epochs=1")
    assert tool(house, "evaluate", f"run={run}", "checkpoint=average") == 2
    assert "kept no averaged weights (trainer.average_decay was null)" in capsys.readouterr().err


def test_unreadable_images_have_a_row_and_a_line(
    house: House, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D02: half a file, an empty one, a text and a missing one are named; the others are predicted; exit 1."""
    scans = write_scans(tmp_path / "scans")
    whole = tmp_path / "whole.csv"
    assert tool(house, "predict", f"run={faces}", f"images={tmp_path / 'scans'}", f"out={whole}") == 0
    (tmp_path / "scans" / "half.jpg").write_bytes(scans[1].read_bytes()[:300])
    (tmp_path / "scans" / "empty.png").write_bytes(b"")
    (tmp_path / "scans" / "page.png").write_text("<html>not here</html>")
    os.mkfifo(tmp_path / "scans" / "pipe.png")  # opening it would wait forever
    out = tmp_path / "some.csv"
    capsys.readouterr()
    words = (f"images={tmp_path / 'scans'}", f"images={tmp_path / 'gone.png'}", f"out={out}")
    assert tool(house, "predict", f"run={faces}", *words) == 1
    told = capsys.readouterr()
    found = {Path(row["path"]).name: row for row in predictions(out)}
    bad = {name: row for name, row in found.items() if row["error"]}
    assert set(bad) == {"half.jpg", "empty.png", "page.png", "gone.png", "pipe.png"}
    assert "not a regular file" in bad["pipe.png"]["error"]
    assert "the file is empty" in bad["empty.png"]["error"]
    assert "not an image" in bad["page.png"]["error"]
    assert "No such file" in bad["gone.png"]["error"]
    for name, row in bad.items():
        assert (row["prediction"], row["unit"]) == ("", "")
        assert str(tmp_path) not in row["error"]
        assert name in told.err
    assert "6 predictions in years, 5 errors" in told.out
    for row in predictions(whole):
        assert float(found[Path(row["path"]).name]["prediction"]) == pytest.approx(
            float(row["prediction"]), rel=1e-5
        )


def test_patterns_lists_and_folders(
    house: House,
    faces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Relative to the current folder, in order, each image once, names with commas and brackets included."""
    monkeypatch.chdir(tmp_path)
    write_scans(tmp_path / "scans" / "deep", 3)
    shutil.copy("scans/deep/scan-0.png", "scans/a,[b].png")
    shutil.copy("scans/deep/scan-0.png", "scans/.hidden.png")
    (tmp_path / "scans" / "notes.txt").write_text("no image")
    deep = [f"scans/deep/scan-{number}" for number in range(3)]
    every = [*(f"{name}.{kind}" for name, kind in zip(deep, ("png", "jpg", "png"), strict=True))]
    cases = {
        "images=scans": ["scans/a,[b].png", *every],
        "images=scans/a,[b].png": ["scans/a,[b].png"],
        "images=scans/deep/*.png": [every[0], every[2]],
        "images=scans/**/*.jpg": [every[1]],
        f"images=[{every[2]}, {every[0]},{every[2]}]": [every[2], every[0]],
    }
    for word, expected in cases.items():
        assert tool(house, "predict", f"run={faces}", word) == 0
        assert [row["path"] for row in predictions(Path("predictions.csv"))] == expected
    for suffix in ("gif", "jfif", "JPE"):
        image = Image.open("scans/deep/scan-0.png").convert("RGB")
        image.save(f"b.{suffix}", "GIF" if suffix == "gif" else "JPEG")
    capsys.readouterr()
    assert tool(house, "predict", f"run={faces}", "images=.") == 0
    found = {row["path"] for row in predictions(Path("predictions.csv"))}
    assert found == {"scans/a,[b].png", *every, "b.gif", "b.jfif", "b.JPE"}
    assert (
        "2 files in . left out, no image by its name: predictions.csv, scans/notes.txt"
        in capsys.readouterr().err
    )


def test_a_file_that_is_no_predictions_is_left_alone(
    house: House, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions are replaced by predictions, anything else by nothing."""
    (scan,) = write_scans(tmp_path / "scans", 1)
    out = tmp_path / "out.csv"
    out.write_text("my,table\n1,2\n")
    assert tool(house, "predict", f"run={faces}", f"images={scan}", f"out={out}") == 2
    assert "holds no predictions" in capsys.readouterr().err
    assert out.read_text() == "my,table\n1,2\n"
    out.unlink()
    for _ in range(2):
        assert tool(house, "predict", f"run={faces}", f"images={scan}", f"out={out}") == 0
    assert len(predictions(out)) == 1
    assert tool(house, "predict", f"run={faces}", f"images={scan}", f"out={tmp_path / 'no' / 'p.csv'}") == 2
    assert tool(house, "predict", f"run={faces}", f"images={scan}", f"out={tmp_path}") == 2
    messages = capsys.readouterr().err
    assert "there is no folder" in messages
    assert "is a folder" in messages


def test_nothing_found_is_one_message(
    house: House, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D01: an empty folder, a pattern without a match, a file that is not there: exit 2, nothing written."""
    (tmp_path / "empty").mkdir()
    for images in ("empty", "*.png", "none.png"):
        out = tmp_path / "p.csv"
        assert tool(house, "predict", f"run={faces}", f"images={tmp_path / images}", f"out={out}") == 2
        assert "no image found" in capsys.readouterr().err
        assert not out.exists()


def test_other_data_is_refused(
    house: House, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D11: another manifest is another data set; so is one that is not there."""
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(house.root / "data" / "raw" / "afad", folder)
    best = read_rows(faces)[read_run(faces)["best"]["epoch"] - 1]
    result = evaluated(house, faces, capsys, f"dataset.root={same}")
    assert result["loss"] == float(best["test_loss"])
    Image.new("RGB", (20, 20), (9, 9, 9)).save(sorted(other.rglob("*.jpg"))[0])
    assert tool(house, "evaluate", f"run={faces}", f"dataset.root={other}") == 2
    message = capsys.readouterr().err
    assert "is not the one that the run was trained on" in message
    assert read_run(faces)["dataset"]["manifest_sha256"][:12] in message
    assert tool(house, "evaluate", f"run={faces}", f"dataset.root={tmp_path / 'nothing'}") == 2
    assert "no usable raw data" in capsys.readouterr().err
