"""run.json and metrics.csv: exact, atomic, exclusive, and honest about damage."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gramgn.errors import InputError
from gramgn.records import (
    AVERAGE_COLUMNS,
    INTEGER_COLUMNS,
    METRIC_COLUMNS,
    RunFolder,
    atomic_file,
    find_runs,
    write_atomic,
)

CELLS = {
    name: st.none() | (st.integers(0, 2**53) if name in INTEGER_COLUMNS else st.floats())
    for name in METRIC_COLUMNS
    if name != "epoch"
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


@contextmanager
def disk_full_after(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: the write that crosses it is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@given(cells=st.fixed_dictionaries(CELLS))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_value_reads_back_bit_for_bit(folder: RunFolder, cells: dict[str, float | None]) -> None:
    folder.metrics_csv.unlink(missing_ok=True)
    folder.append_metrics({"epoch": 1, **cells})
    (row,) = folder.read_metrics()
    assert list(row) == list(METRIC_COLUMNS)
    for name, value in cells.items():
        assert repr(row[name]) == repr(value), name


def test_missing_values_are_empty_cells_and_unknown_columns_are_refused(folder: RunFolder) -> None:
    folder.append_metrics({"epoch": 1, "val_loss": 0.5})
    header, line = folder.metrics_csv.read_text().splitlines()
    on_request = ("momentum", *AVERAGE_COLUMNS)
    assert header.split(",") == [name for name in METRIC_COLUMNS if name not in on_request]
    assert sorted(cell for cell in line.split(",") if cell) == ["0.5", "1"]
    with pytest.raises(ValueError, match="val_los"):
        folder.append_metrics({"epoch": 2, "val_los": 0.5})
    with pytest.raises(ValueError, match="epoch"):
        folder.append_metrics({"val_loss": 0.5})
    assert len(folder.read_metrics()) == 1


@pytest.mark.parametrize("cut", [1, 2, 25, 250])
def test_a_file_cut_anywhere_is_damaged(folder: RunFolder, cut: int) -> None:
    """F01: this program replaces the file as a whole; of `0.125` cut by somebody else, `0.12` is not taken."""
    folder.append_metrics({"epoch": 1, "val_loss": 0.125})
    folder.metrics_csv.write_bytes(folder.metrics_csv.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"metrics\.csv"):
        folder.read_metrics()


def test_damage_is_an_error_that_names_the_line(folder: RunFolder) -> None:
    for epoch in (1, 2):
        folder.append_metrics({"epoch": epoch})
    lines = folder.metrics_csv.read_text().splitlines(keepends=True)
    folder.metrics_csv.write_text(lines[0] + "1,2\n" + lines[2])
    with pytest.raises(InputError, match=r"line 2 is damaged"):
        folder.read_metrics()


def test_a_foreign_csv_is_refused(folder: RunFolder) -> None:
    folder.metrics_csv.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="not a metrics file"):
        folder.read_metrics()
    with pytest.raises(InputError, match="another version"):
        folder.append_metrics({"epoch": 1})
    assert folder.metrics_csv.read_text() == "a,b\n1,2\n"


def test_fewer_columns_of_an_older_version_can_be_read_but_not_continued(folder: RunFolder) -> None:
    folder.metrics_csv.write_text("epoch,val_loss\n1,0.5\n")
    (row,) = folder.read_metrics()
    assert (row["val_loss"], row["test_loss"]) == (0.5, None)
    with pytest.raises(InputError, match="another version"):
        folder.append_metrics({"epoch": 2})


def test_columns_on_request_are_in_every_row_of_a_file_or_in_none(folder: RunFolder) -> None:
    folder.append_metrics({"epoch": 1, "average_val_loss": None})
    folder.append_metrics({"epoch": 2, "average_val_loss": 0.5})
    folder.append_metrics({"epoch": 3})
    folder.truncate_metrics(2)
    assert [row["average_val_loss"] for row in folder.read_metrics()] == [None, 0.5]
    with pytest.raises(InputError, match="another version"):
        folder.append_metrics({"epoch": 3, "momentum": 0.9})


def test_truncate_cuts_back_to_the_checkpoint(folder: RunFolder) -> None:
    folder.truncate_metrics(3)
    assert not folder.metrics_csv.exists()
    for epoch in range(1, 5):
        folder.append_metrics({"epoch": epoch, "lr": 0.1 * epoch})
    folder.truncate_metrics(2)
    assert [(row["epoch"], row["lr"]) for row in folder.read_metrics()] == [(1, 0.1), (2, 0.2)]


def test_a_full_disk_is_one_message_and_leaves_whole_rows(folder: RunFolder) -> None:
    folder.append_metrics({"epoch": 1})
    before = folder.metrics_csv.read_bytes()
    with disk_full_after(len(before) + 10), pytest.raises(InputError, match=r"metrics\.csv.*Free some space"):
        folder.append_metrics({"epoch": 2})
    assert folder.metrics_csv.read_bytes() == before


def test_a_full_disk_leaves_the_old_run_json(folder: RunFolder) -> None:
    folder.write_run({"state": "running"})
    before = folder.run_json.read_bytes()
    with disk_full_after(10), pytest.raises(InputError, match=r"run\.json"):
        folder.write_run({"state": "done", "name": "x" * 100})
    assert folder.run_json.read_bytes() == before
    assert sorted(entry.name for entry in folder.path.iterdir()) == [".lock", "run.json"]


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "old")

    def fail() -> None:
        with atomic_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_run_json_is_strict_json_also_with_nan(folder: RunFolder) -> None:
    folder.write_run({"state": "diverged", "best": {"val_loss": math.nan, "all": [math.inf, 1.5]}})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    strict = json.loads(folder.run_json.read_text(), parse_constant=refuse)
    assert strict["format"] == 1
    assert math.isnan(float(strict["best"]["val_loss"]))
    assert folder.update_run(state="done")["best"]["all"] == ["inf", 1.5]
    assert folder.read_run()["state"] == "done"


def test_a_state_that_does_not_exist_is_refused(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="finished"):
        folder.write_run({"state": "finished"})
    assert not folder.run_json.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[]", "this version reads format 1"),
        ('{"format": 2, "state": "done"}', "has format 2"),
        ('{"format": 1}', "state None"),
        ('{"format": 1, "state": "done", "config": {"trainer": []}}', "'config.trainer' is .* not a mapping"),
        ('{"format": 1, "state": "done", "seed": true}', "'seed' is 'True', not a whole number"),
        (
            '{"format": 1, "state": "done", "starts": [{"time_utc": 5}]}',
            "starts.*time_utc' is '5', not a text",
        ),
    ],
)
def test_a_damaged_run_json_is_one_message(folder: RunFolder, content: str, message: str) -> None:
    folder.run_json.write_text(content)
    with pytest.raises(InputError, match=rf"run\.json.*{message}"):
        folder.read_run()


def test_a_reader_names_the_entries_that_it_needs(folder: RunFolder) -> None:
    folder.write_run({"state": "done", "id": "a", "config": {"trainer": {}}})
    assert folder.read_run("id", "config.trainer")["id"] == "a"
    with pytest.raises(InputError, match=r"no entry 'config\.model'.*Put the original back"):
        folder.read_run("config.model")


def test_a_folder_that_holds_something_is_not_written(tmp_path: Path) -> None:
    """H06: a non-empty folder is never written unless resume is asked."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not empty.*notes\.txt.*resume="):
        RunFolder.create(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
    RunFolder.create(tmp_path, allowed={"notes.txt"})


def test_of_many_starts_in_one_folder_one_gets_it(tmp_path: Path) -> None:
    """H06: the folder is created exclusively."""

    def start(_: int) -> bool:
        try:
            RunFolder.create(tmp_path / "run")
        except InputError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(start, range(8))) == 1


def test_two_processes_cannot_write_one_run(folder: RunFolder) -> None:
    code = (
        "import sys; from gramgn.records import RunFolder\n"
        "with RunFolder(sys.argv[1]).lock(): print('got it')"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    with folder.lock():
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "another process is writing the run" in refused.stderr
    assert refused.returncode != 0
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "got it\n"
    )


def test_opening_what_is_not_a_run_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        RunFolder.open(tmp_path / "nowhere")
    (tmp_path / "cat.png").touch()
    with pytest.raises(InputError, match=r"no run\.json.*cat\.png"):
        RunFolder.open(tmp_path)


def test_runs_are_found_at_any_depth(tmp_path: Path) -> None:
    for name in ("sweeps/a/2", "runs/x", "sweeps/a/1"):
        RunFolder.create(tmp_path / name).write_run({"state": "done"})
    found = [str(run.path.relative_to(tmp_path)) for run in find_runs(tmp_path)]
    assert found == ["runs/x", "sweeps/a/1", "sweeps/a/2"]
    assert find_runs(tmp_path / "nowhere") == []
