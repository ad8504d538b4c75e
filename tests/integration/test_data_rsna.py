"""RSNA Bone Age in its distributions: tables and images joined, official sets, mismatches."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from data_cases import (
    months,
    read_rows,
    train_rows,
    write_csv,
    write_kaggle,
    write_neuro,
    write_official,
    write_png,
)

from gramgn.data import RSNA
from gramgn.errors import DataError


def rsna(root: Path, **options: Any) -> RSNA:
    """Return the data set with its prepared folder beside the root."""
    return RSNA(root, **{"prepared_root": root.parent / "prepared", "workers": 1, **options})


def splits(dataset: RSNA) -> dict[str, str]:
    """Prepare and return the split of every key."""
    data = dataset.load(8)
    return dict(zip(map(str, data.keys), map(str, data.split), strict=True))


def test_kaggle_distribution(tmp_path: Path) -> None:
    """D09: doubly nested folders; the test images without ages are reported, not used."""
    write_kaggle(tmp_path / "raw")
    data = rsna(tmp_path / "raw").load(8)
    assert (data.unit, data.kind, data.channels, data.images.shape) == ("months", "real", 3, (40, 1, 8, 8))
    expected = {str(number): months(number) for number in range(1377, 1417)}
    assert dict(zip(data.keys, data.targets, strict=True)) == expected
    assert data.summary["unused"] == {
        "no bone age in this distribution": 4,
        "table without columns for id and bone age": 1,
    }


def test_official_distribution(tmp_path: Path) -> None:
    """D10: the official validation set is the test split, training images are split 90/10."""
    write_official(tmp_path / "raw", 100)
    by_key = splits(rsna(tmp_path / "raw"))
    test = {key for key, split in by_key.items() if split == "test"}
    assert test == {f"validation-{number}" for number in range(9000, 9010)}
    assert sum(split == "val" for split in by_key.values()) in range(4, 20)
    assert len(by_key) == 110


def test_neuro_distribution(tmp_path: Path) -> None:
    """D09: one level down, other folder names."""
    write_neuro(tmp_path / "raw")
    assert set(splits(rsna(tmp_path / "raw"))) == {str(number) for number in range(1377, 1417)}


def test_distributions_agree_on_samples_and_split(tmp_path: Path) -> None:
    """D11: the same radiographs from two distributions are the same data set."""
    write_kaggle(tmp_path / "one" / "raw")
    write_neuro(tmp_path / "two" / "raw")
    first, second = (rsna(tmp_path / name / "raw").load(8) for name in ("one", "two"))
    assert first.manifest_sha256 == second.manifest_sha256
    assert (first.images == second.images).all()


def test_row_order_does_not_matter(tmp_path: Path) -> None:
    """D11: copies of the table with another order of rows give the same manifest."""
    write_kaggle(tmp_path / "one" / "raw")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    table = tmp_path / "two" / "raw" / "boneage-training-dataset.csv"
    header, *rows = read_rows(table)
    random.Random(0).shuffle(rows)
    write_csv(table, header, rows)
    first, second = (rsna(tmp_path / name / "raw").load(8) for name in ("one", "two"))
    assert first.manifest_sha256 == second.manifest_sha256


@pytest.mark.parametrize(
    ("test_from", "expected"),
    [
        ("auto", {"": "train val", "validation": "test"}),
        ("validation", {"": "train val", "validation": "test"}),
        ("test", {"": "train", "validation": "val", "test": "test"}),
        ("split", {"": "train val test"}),
    ],
)
def test_test_from(tmp_path: Path, test_from: str, expected: dict[str, str]) -> None:
    write_official(tmp_path / "raw", 100)
    found: dict[str, set[str]] = {}
    for key, split in splits(rsna(tmp_path / "raw", test_from=test_from)).items():
        found.setdefault(key.rpartition("-")[0], set()).add(split)
    assert found == {role: set(names.split()) for role, names in expected.items()}


@pytest.mark.parametrize("test_from", ["validation", "test"])
def test_a_set_that_is_not_there_is_named(tmp_path: Path, test_from: str) -> None:
    write_kaggle(tmp_path / "raw")
    with pytest.raises(DataError, match=f"no {test_from} set.*Sets found: train"):
        rsna(tmp_path / "raw", test_from=test_from).load(8)


def test_official_test_truth_in_xlsx(tmp_path: Path) -> None:
    """D09: test truth from the workbook, as it is distributed."""
    openpyxl = pytest.importorskip("openpyxl", reason="needs the extra xlsx: pip install -e .[xlsx]")
    write_official(tmp_path / "raw")
    truth = tmp_path / "raw" / "Bone Age Test Set" / "Bone age ground truth.csv"
    book = openpyxl.Workbook()
    for row in read_rows(truth):
        book.active.append([float(cell) if "." in cell else cell for cell in row])
    book.save(truth.with_suffix(".xlsx"))
    truth.unlink()
    data = rsna(tmp_path / "raw", test_from="test").load(8)
    targets = data.targets[data.split == "test"]
    assert sorted(targets) == pytest.approx([months(number) + 0.93 for number in range(4360, 4366)])


def damaged_kaggle(root: Path) -> None:
    """Write Kaggle's distribution with everything that can be wrong with a join."""
    write_kaggle(root, num_test=0)
    images = root / "boneage-training-dataset" / "boneage-training-dataset"
    for number in (1380, 1381, 1382):
        (images / f"{number}.png").unlink()
    write_png(images, (7, 8))
    rows: list[Any] = [list(row) for row in train_rows(range(1377, 1417))]
    rows.append([1390, 11, "True"])
    rows[20][1] = ""
    write_csv(root / "boneage-training-dataset.csv", ("id", "boneage", "male"), rows)


def test_mismatch_beyond_the_limit_is_an_error(tmp_path: Path) -> None:
    """D09: counts of all kinds, and three examples of each."""
    damaged_kaggle(tmp_path / "raw")
    dataset = rsna(tmp_path / "raw")
    dataset.check(8)
    with pytest.raises(DataError) as error:
        dataset.load(8)
    message = str(error.value)
    for part in (
        "35 matched",
        "3 labels without an image",
        "2 images without a label",
        "1 ids labelled twice with different ages",
        "1 rows without a usable age",
        "1380.png, 1381.png, 1382.png",
        "7.png",
        "max_unmatched=0.01",
        str(tmp_path / "raw"),
    ):
        assert part in message, part


def test_mismatch_within_the_limit_is_recorded(tmp_path: Path) -> None:
    """D09: what is tolerated is counted and listed."""
    damaged_kaggle(tmp_path / "raw")
    dataset = rsna(tmp_path / "raw", max_unmatched=0.2)
    data = dataset.load(8)
    assert len(data.keys) == 35
    assert not {"1380", "1390", "1397", "7"} & set(data.keys)
    unused = (dataset.prepared_folder(8) / "unused.csv").read_text()
    for part in (
        "id 1380",
        "id 1390",
        "row 22 (1397, no age)",
        "7.png,image without a label",
        "label cannot be used",
    ):
        assert part in unused


def test_copies_from_unpacking_twice(tmp_path: Path) -> None:
    """D01: a second copy is left out and reported; two different images for one id are an error."""
    write_kaggle(tmp_path / "raw")
    nested = tmp_path / "raw" / "boneage-training-dataset"
    shutil.copytree(nested / "boneage-training-dataset", nested / "training-again")
    assert len(rsna(tmp_path / "raw").load(8).keys) == 40
    write_png(tmp_path, (5,))
    shutil.copy(tmp_path / "5.png", nested / "training-again" / "1377.png")
    with pytest.raises(DataError, match="two different images for id 1377"):
        rsna(tmp_path / "raw").index()


def test_copies_of_test_images_leave_the_training_set(tmp_path: Path) -> None:
    """D10: the same bytes in the official test split and in training: the training copy goes."""
    write_official(tmp_path / "raw")
    (copied,) = (tmp_path / "raw").rglob("9003.png")
    shutil.copy(copied, tmp_path / "raw" / "Bone Age Training Set" / "boneage-training-dataset" / "1390.png")
    by_key = splits(rsna(tmp_path / "raw"))
    assert "1390" not in by_key
    assert by_key["validation-9003"] == "test"


def test_merged_folders_are_joined_by_id(tmp_path: Path) -> None:
    """D01: all images in one folder, as some people keep them."""
    write_official(tmp_path / "raw")
    for path in sorted((tmp_path / "raw").rglob("*.png")):
        (tmp_path / "raw" / "images").mkdir(exist_ok=True)
        path.rename(tmp_path / "raw" / "images" / path.name)
    by_key = splits(rsna(tmp_path / "raw"))
    assert sum(split == "test" for split in by_key.values()) == 10
    assert len(by_key) == 50


@pytest.mark.parametrize("content", ["empty", "images only", "table only", "foreign table"])
def test_no_radiographs_is_an_error(tmp_path: Path, content: str) -> None:
    """D01: one message with the folder, what was found, where to get the data."""
    root = tmp_path / "raw"
    root.mkdir()
    if "images" in content or "foreign" in content:
        write_png(root / "boneage-training-dataset", (1, 2))
    if "table" in content:
        header = ("file", "path", "age") if "foreign" in content else ("id", "boneage", "male")
        write_csv(root / "t.csv", header, [(1, 2, 3)])
    with pytest.raises(DataError) as error:
        rsna(root).load(8)
    for part in (str(root), "id,boneage,male", "rsna.org", "dataset=rsna_synthetic"):
        assert part in str(error.value)


def test_hidden_files_and_strays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D04: planted everywhere, they change nothing; those of the system are recorded, but not reported."""
    write_kaggle(tmp_path / "raw", num_test=0)
    nested = tmp_path / "raw" / "boneage-training-dataset"
    image = (nested / "boneage-training-dataset" / "1377.png").read_bytes()
    for folder in (tmp_path / "raw", nested, nested / "boneage-training-dataset"):
        for name in ("._1377.png", "Thumbs.db", "desktop.ini", "notes.png", "1377.png.part"):
            (folder / name).write_bytes(image)
        (folder / "__MACOSX").mkdir()
        (folder / "__MACOSX" / "1.png").write_bytes(image)
    (tmp_path / "raw" / "~$table.xlsx").write_bytes(b"lock")
    data = rsna(tmp_path / "raw").load(8)
    assert len(data.keys) == 40
    assert data.summary["unused"] == {"system or hidden file": 13, "name is not <id>.png": 6}
    err = capsys.readouterr().err
    assert "6 x name is not <id>.png" in err
    assert "system or hidden file" not in err


def test_grey_is_stored_once(tmp_path: Path) -> None:
    """D07: one channel is stored, three are seen."""
    write_kaggle(tmp_path / "raw")
    three, one = (rsna(tmp_path / "raw", channels=channels).load(8) for channels in (3, 1))
    assert three.images.shape[1] == one.images.shape[1] == 1
    assert (three.channels, one.channels) == (3, 1)
    assert three.summary["targets"]["train_sd"] == pytest.approx(three.targets[three.split == "train"].std())
