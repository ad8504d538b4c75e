"""RSNA label tables: recognised by columns, checked row by row."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from data_cases import write_csv, write_png

from gramgn.data import RSNA, Index
from gramgn.errors import DataError

TRAIN = ("id", "boneage", "male")


def index(root: Path, ids: range = range(7, 10)) -> Index:
    """Return what is found of label tables below `root`, with an image for each id and set."""
    for role in ("train", "valid", "test"):
        write_png(root / "images" / role, ids)
    return RSNA(root, test_from="split", max_unmatched=1.0).index()


def used(found: Index) -> list[tuple[str, float, str]]:
    """Return key, age and sex of the training images in use."""
    return [(item.key, item.target, item.sex) for item in found.items]


@pytest.mark.parametrize(
    ("name", "header", "row", "role"),
    [
        ("train.csv", TRAIN, (7, 100, "True"), "train"),
        ("labels.csv", TRAIN, (7, 100, "True"), "train"),
        ("labels.csv", (" ID ", "Bone Age", "MALE"), ("0007", "100.0", "1"), "train"),
        ("labels.csv", ("Image ID", "male", "Bone Age (months)"), (7, "TRUE", 100), "validation"),
        ("labels.csv", ("Case ID", "Sex", "Ground truth bone age (months)"), (7, "M", "100"), "test"),
        ("Bone Age Test Set/truth.csv", ("id", "sex", "boneage"), ("7.png", "m", "1e2"), "test"),
    ],
)
def test_tables_are_recognised(
    tmp_path: Path, name: str, header: tuple[str, ...], row: tuple[object, ...], role: str
) -> None:
    """D09: three sets of column names, any case and spacing."""
    write_csv(tmp_path / name, header, [row])
    write_csv(tmp_path / "z" / "train.csv", TRAIN, [(8, 90, "False")])
    found = index(tmp_path)
    assert {"table": name, "set": role, "rows": 1} in found.facts["tables"]
    if role == "train":
        assert used(found) == [("7", 100.0, "M"), ("8", 90.0, "F")]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffid,boneage,male\r\n7,100,True\r\n",
        "id;boneage;male\n7;100;True\n",
        "id,boneage,male\n\n7,100,True,a remark,another\n , ,\n8\n",
        '"id","boneage","male, if known"\n"7"," 100 ",True\n',
        "id\tboneage\tmale\n7\t100\tTrue\n",
        "sep=;\nid;boneage;male\n7;100;True\n",
        "\ufeffsep=\t\r\nid\tboneage\tmale\r\n7\t100\tTrue\r\n",
        "id,boneage,male\n7,100 months,True\n",
        'id;boneage;male, if known\n7;"100,0";True\n',
        "id;boneage;male\n7,0;100,00;True\n",
        "id;boneage;male\n7.jpg;100 mo.;True\n",
        "id|boneage|male\n7|100|True\n",
    ],
)
def test_tables_from_spreadsheets(tmp_path: Path, text: str) -> None:
    """D09: a byte order mark, semicolons, quotes, blank lines, rows that are too long or too short."""
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    ((key, months, _),) = used(index(tmp_path))
    assert (key, months) == ("7", 100.0)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_unicode_text_of_a_spreadsheet(tmp_path: Path, name: str) -> None:
    """D09: UTF-16 with tabs; what follows a blank line has the number of its own line."""
    text = "id\tboneage\tmale\r\n\r\n7\t12,5\tTrue\r\n8\tx\tTrue\r\n"
    (tmp_path / name).write_bytes(text.encode("utf-16"))
    found = index(tmp_path)
    assert used(found) == [("7", 12.5, "M")]
    assert f"{name}: row 4 (8, x)" in [entry.path for entry in found.unused]


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("1.377e+03", 1377),
        ("1,377E+03", 1377),
        ("1.50000E+04", 15000),
        ("1.4e+03", None),
        ("1.3775e+03", None),
    ],
)
def test_ids_of_a_spreadsheet(tmp_path: Path, cell: str, number: int | None) -> None:
    """D09: in scientific notation only if no digit is lost."""
    write_csv(tmp_path / "t.csv", TRAIN, [(cell, 100, "True"), (8, 90, "False")])
    found = index(tmp_path, range(8, 9) if number is None else range(number, number + 1))
    if number is None:
        (entry,) = (each for each in found.unused if each.path.startswith("t.csv: row"))
        assert entry.path == f"t.csv: row 2 ({cell}, 100)"
        assert "without a usable id" in entry.reason
    else:
        assert [key for key, _, _ in used(found)] == [str(number)]


def test_radiographs_may_be_jpeg(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", TRAIN, [(7, 100, "True"), (8, 90, "False")])
    write_png(tmp_path, (7, 8))
    (tmp_path / "7.png").rename(tmp_path / "7.jpg")
    (tmp_path / "8.png").rename(tmp_path / "0008.JPEG")
    dataset = RSNA(tmp_path)
    assert dataset.has_raw()
    assert used(dataset.index()) == [("7", 100.0, "M"), ("8", 90.0, "F")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,boneage,male\n7,ten,True\n", ["t.csv: row 2 (7, ten): label row without a usable age"]),
        ("id,boneage,male\nseven,10,True\n", ["t.csv: row 2 (seven, 10): label row without a usable id"]),
        ("id:boneage:male\n7:10:True\n", ["the table t.csv has the columns id:boneage:male"]),
        ("id,boneage,male\n7,12,5,True\n", ["t.csv: row 2 (7, 12): label row whose cells are shifted"]),
        ("id,boneage\n7,12,5\n", ["t.csv: row 2 (7, 12): label row whose cells are shifted"]),
        ("boneage,id,male\n12,5,7,1\n", ["t.csv: row 2 (5, 12): label row whose cells are shifted"]),
        ("id,boneage,male,Bone Age (months)\n7,1,1,2\n", ["several columns of one meaning: boneage, Bone"]),
        ("id,Case ID,boneage\n7,8,9\n", ["several columns of one meaning: id, Case ID"]),
        ("name,age\n7,10\n", ["the table t.csv has the columns name, age"]),
        ("", ["the table t.csv has the columns none"]),
    ],
)
def test_tables_without_a_usable_row_say_why(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError) as error:
        index(tmp_path)
    for word in words:
        assert word in str(error.value)


def test_ages_that_look_like_years_are_noted(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", TRAIN, [(7, 12, "True"), (8, 18, "False")])
    assert "the largest bone age is 18: it is taken in months; are these years?" in index(tmp_path).notes
    write_csv(tmp_path / "t.csv", TRAIN, [(7, 12, "True"), (8, 118, "False")])
    assert not any("years" in note for note in index(tmp_path).notes)


def test_a_table_that_is_a_named_pipe_is_named(tmp_path: Path) -> None:
    """Opening it would wait forever."""
    for name in ("t.csv", "t.xlsx"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=rf"{name}: not a regular file"):
            index(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "age", ["12 years", "1_0", "", " ", "nan", "inf", "unknown", "-3", "0", "2014", "1,234"]
)
def test_unusable_ages_are_counted(tmp_path: Path, age: str) -> None:
    """D09: blank, NaN, out of range: the row is named and not used."""
    write_csv(tmp_path / "t.csv", TRAIN, [(7, age, "True"), (8, 90, "False")])
    found = index(tmp_path)
    assert used(found) == [("8", 90.0, "F")]
    assert found.facts["counts"]["rows without a usable age"] == 1
    assert f"t.csv: row 2 (7, {age.strip() or 'no age'})" in [entry.path for entry in found.unused]


def test_a_table_cut_in_its_last_line_is_rejected(tmp_path: Path) -> None:
    """What is left of an age of 73 would be another age."""
    (tmp_path / "t.csv").write_text("id,boneage,male\n8,90,False\n7,7")
    with pytest.raises(DataError, match=r"t\.csv is cut in its last line"):
        index(tmp_path)
    (tmp_path / "t.csv").write_text("id,boneage,male\n8,90,False\n7,73,True")  # only the line end is missing
    assert {months for _, months, _ in used(index(tmp_path))} == {90.0, 73.0}


def test_duplicates_agree_or_are_dropped(tmp_path: Path) -> None:
    """D09: two rows that agree are one; two that do not are none, and both are counted."""
    rows = [(7, 90, ""), (7, 90, "True"), (8, 90, ""), (8, 91, ""), (9, 1, "")]
    write_csv(tmp_path / "t.csv", TRAIN, rows)
    found = index(tmp_path)
    assert used(found) == [("7", 90.0, "M"), ("9", 1.0, "")]
    counts = found.facts["counts"]
    assert (counts["ids labelled twice"], counts["ids labelled twice with different ages"]) == (1, 1)
    assert "t.csv: train id 8" in [entry.path for entry in found.unused]


def test_row_order_does_not_matter(tmp_path: Path) -> None:
    """D11: copies of the table in another order give the same labels."""
    rows = [(number, 30 + number, "True") for number in range(20)]
    write_csv(tmp_path / "a" / "t.csv", TRAIN, rows)
    write_csv(tmp_path / "b" / "t.csv", TRAIN, rows[::-1])
    assert index(tmp_path / "a", range(20)).items == index(tmp_path / "b", range(20)).items


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ("latest/images", "train"),  # by its columns
        ("Bone Age Validation Set/boneage-validation-dataset-1", "validation"),
        ("boneage-training-dataset/boneage-training-dataset", "train"),
        ("train/test", "test"),
    ],
)
def test_official_sets_by_folder_name(tmp_path: Path, names: str, role: str) -> None:
    write_csv(tmp_path / names / "t.csv", TRAIN, [(7, 100, "M")])
    write_csv(tmp_path / "train.csv", TRAIN, [(8, 90, "F")])
    assert {"table": f"{names}/t.csv", "set": role, "rows": 1} in index(tmp_path).facts["tables"]


def test_a_table_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,boneage,male\n\xff\xfe\x00,1,1\n")
    with pytest.raises(DataError, match=r"t\.csv.*UTF-8"):
        index(tmp_path)


def test_xlsx_is_read(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="needs the extra xlsx: pip install -e .[xlsx]")
    book = openpyxl.Workbook()
    for row in (("Case ID", "Sex", "Ground truth bone age (months)"), (7, "F", 168.93), (8, "M", None)):
        book.active.append(row)
    book.save(tmp_path / "Bone age ground truth.xlsx")
    write_csv(tmp_path / "train.csv", TRAIN, [(9, 90, "False")])
    write_png(tmp_path / "test", (7, 8))
    write_png(tmp_path / "train", (9,))
    found = RSNA(tmp_path, test_from="test", max_unmatched=1.0).index()
    assert sorted(used(found)) == [("9", 90.0, "F"), ("test-7", 168.93, "F")]
    assert found.facts["counts"]["rows without a usable age"] == 1


def test_xlsx_without_openpyxl_asks_for_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "truth.xlsx").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DataError, match=r"truth\.xlsx.*pip install openpyxl.*CSV"):
        index(tmp_path)


def test_xlsx_is_not_needed_beside_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: whether openpyxl is installed does not decide what is used."""
    (tmp_path / "truth.xlsx").write_bytes(b"anything")
    write_csv(tmp_path / "train.csv", TRAIN, [(8, 90, "False")])
    write_csv(tmp_path / "test.csv", ("Case ID", "Sex", "Ground truth bone age (months)"), [(7, "F", "60.5")])
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert "truth.xlsx" in [entry.path for entry in index(tmp_path).unused]


def test_a_broken_xlsx_is_named(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl", reason="needs the extra xlsx: pip install -e .[xlsx]")
    (tmp_path / "truth.xlsx").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"truth\.xlsx.*CSV"):
        index(tmp_path)


def test_rounded_test_truth_is_pointed_out(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", TRAIN, [(9, 90, "False")])
    write_csv(tmp_path / "test.csv", TRAIN, [(7, 168, "F"), (8, 90, "M")])
    assert any("whole months" in note for note in index(tmp_path).notes)
