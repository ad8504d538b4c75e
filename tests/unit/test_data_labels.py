"""RSNA label tables: recognised by columns, checked row by row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from data_cases import write_csv

from gramgn.data.labels import read_tables, role_of
from gramgn.errors import DataError

TRAIN = ("id", "boneage", "male")


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
    tmp_path: Path, name: str, header: tuple[str, ...], row: object, role: str
) -> None:
    """D09: three sets of column names, any case and spacing."""
    write_csv(tmp_path / name, header, [row])  # type: ignore[list-item]
    (label,) = read_tables(tmp_path).labels
    assert (label.id, label.months, label.sex, label.role, label.table) == (7, 100.0, "M", role, name)


@pytest.mark.parametrize("text", ["\ufeffid,boneage,male\r\n7,100,True\r\n", "id;boneage;male\n7;100;True\n"])
def test_tables_from_spreadsheets(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    assert read_tables(tmp_path).labels[0].months == 100.0


@pytest.mark.parametrize("age", ["", " ", "nan", "inf", "unknown", "-3", "0", "2014"])
def test_unusable_ages_are_counted(tmp_path: Path, age: str) -> None:
    """D09: blank, NaN, out of range: the row is named and not used."""
    write_csv(tmp_path / "t.csv", TRAIN, [(7, age, "True"), (8, 90, "False")])
    tables = read_tables(tmp_path)
    assert [label.id for label in tables.labels] == [8]
    assert tables.num_blank == 1
    assert "row 2 (7)" in tables.bad_rows[0].path


def test_duplicates_agree_or_are_dropped(tmp_path: Path) -> None:
    """D09: two rows that agree are one; two that do not are none, and both are counted."""
    write_csv(
        tmp_path / "t.csv", TRAIN, [(7, 90, "True"), (7, 90, "True"), (8, 90, ""), (8, 91, ""), (9, 1, "")]
    )
    tables = read_tables(tmp_path)
    assert [label.id for label in tables.labels] == [7, 9]
    assert (tables.num_duplicates, tables.num_conflicts) == (1, 1)


def test_row_order_does_not_matter(tmp_path: Path) -> None:
    """D11: copies of the table in another order give the same labels."""
    rows = [(number, 30 + number, "True") for number in range(20)]
    write_csv(tmp_path / "a" / "t.csv", TRAIN, rows)
    write_csv(tmp_path / "b" / "t.csv", TRAIN, rows[::-1])
    assert read_tables(tmp_path / "a").labels == read_tables(tmp_path / "b").labels


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (("latest", "images"), ""),
        (("Bone Age Validation Set", "boneage-validation-dataset-1"), "validation"),
        (("boneage-training-dataset", "boneage-training-dataset"), "train"),
        (("train", "test"), "test"),
    ],
)
def test_official_sets_by_folder_name(names: tuple[str, ...], role: str) -> None:
    assert role_of(names) == role


def test_a_table_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,boneage,male\n\xff\xfe\x00,1,1\n")
    with pytest.raises(DataError, match=r"t\.csv.*UTF-8"):
        read_tables(tmp_path)


def test_xlsx_is_read(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (("Case ID", "Sex", "Ground truth bone age (months)"), (4360, "F", 168.93), (4361, "M", None)):
        book.active.append(row)
    book.save(tmp_path / "Bone age ground truth.xlsx")
    tables = read_tables(tmp_path)
    assert [(label.id, label.months, label.sex, label.role) for label in tables.labels] == [
        (4360, 168.93, "F", "test")
    ]
    assert tables.num_blank == 1


def test_xlsx_without_openpyxl_asks_for_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "truth.xlsx").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DataError, match=r"truth\.xlsx.*pip install openpyxl.*CSV"):
        read_tables(tmp_path)


def test_xlsx_is_not_needed_beside_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: whether openpyxl is installed does not decide what is used."""
    (tmp_path / "truth.xlsx").write_bytes(b"anything")
    write_csv(tmp_path / "test.csv", ("Case ID", "Sex", "Ground truth bone age (months)"), [(1, "F", "60.5")])
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    tables = read_tables(tmp_path)
    assert len(tables.labels) == 1
    assert [entry.path for entry in tables.unused] == ["truth.xlsx"]


def test_a_broken_xlsx_is_named(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    (tmp_path / "truth.xlsx").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"truth\.xlsx.*CSV"):
        read_tables(tmp_path)


def test_rounded_test_truth_is_pointed_out(tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", TRAIN, [(4360, 168, "F"), (4361, 90, "M")])
    assert "whole months" in read_tables(tmp_path).notes[0]
