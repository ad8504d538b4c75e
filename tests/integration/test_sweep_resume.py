"""The same command again: what is kept, what goes on, what is refused."""

from __future__ import annotations

import shutil

import pytest
from house import SMALL, Call, House, read_rows, read_run
from sweeps import cell, contents, edit_run, states, sweep_of

pytestmark = pytest.mark.timeout(180)
PAIR = (*SMALL, "trainer.epochs=1", "name=pair")


def test_nothing_finished_is_touched(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """H08: done and diverged cells keep time and content, are said to be kept, and no process is started."""
    options = (*SMALL, "optimizer=sgd", "optimizer.lr=0.01,1e30", "name=pair")
    assert call(*options, multirun=True) == 0
    assert states(house, "pair") == ["done", "diverged"]
    before = contents(sweep_of(house, "pair").path)
    capsys.readouterr()
    assert call(*options, "hydra.launcher.n_jobs=2", "tracking=none", multirun=True) == 0
    err = capsys.readouterr().err
    assert "kept: optimizer.lr=0.01 is done already" in err
    assert "kept: optimizer.lr=1e+30 is diverged already" in err
    after = contents(sweep_of(house, "pair").path)
    assert {name: content for name, (_, content) in after.items()} == {
        name: content for name, (_, content) in before.items()
    }
    changed = [name for name in after if after[name][0] != before[name][0]]
    assert changed in ([], ["sweep.lock"])


def test_a_longer_axis_adds_cells(call: Call, house: House) -> None:
    """H08: cells are found again when the sweep varies more; one value first, then three."""
    assert call(*PAIR, "optimizer.lam=1e0", multirun=True) == 0
    (first,) = house.runs()
    before = contents(first)
    assert call(*PAIR, "optimizer.lam=choice(1e0,2)", multirun=True) == 0
    assert states(house, "pair") == ["done"] * 2
    assert cell(house, "optimizer.lam=1.0", "pair").folder == first
    assert contents(first) == before


def test_another_configuration_is_refused(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H08: by its hash, with the keys that differ; nothing is overwritten, the other cells are done."""
    assert call(*PAIR, "seed=0,1", multirun=True) == 0
    folder = cell(house, "seed=0", "pair").folder
    config = read_run(folder)["config"]
    edit_run(folder, config={**config, "optimizer": {**config["optimizer"], "lam": 7.0}})
    shutil.rmtree(cell(house, "seed=1", "pair").folder)
    before = contents(folder)
    capsys.readouterr()
    assert call(*PAIR, "seed=0,1", multirun=True) == 1
    err = capsys.readouterr().err
    assert "optimizer.lam (7.0 then, 1.0 now)" in err
    assert "refused" in err.split("jobs in")[1]
    assert contents(folder) == before
    assert states(house, "pair") == ["done", "done"]
    assert call(*PAIR, "seed=0", multirun=True) == 2
    assert contents(folder) == before


def test_what_changes_no_result_may_change(call: Call, house: House) -> None:
    """A run that was interrupted goes on with other threads, and stays the cell it is."""
    assert call(*PAIR, "trainer.epochs=2", "seed=0", multirun=True) == 0
    (folder,) = house.runs()
    edit_run(folder, state="interrupted")
    assert call(*PAIR, "trainer.epochs=2", "seed=0", "trainer.threads=1", multirun=True) == 0
    assert house.runs() == [folder]
    assert read_run(folder)["resume_count"] == 1
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2"]


def test_a_failed_cell_is_tried_again(call: Call, house: House) -> None:
    """A job that failed before its first epoch begins anew in its folder, and its former log stays."""
    assert call(*PAIR, "dataset.bad=memory", multirun=True) == 1
    (folder,) = house.runs()
    assert call(*PAIR, "dataset.bad=memory", multirun=True) == 1
    assert (folder / "output.log").read_text().count("MemoryError:") == 2
    assert house.runs() == [folder]


def test_a_failed_cell_takes_a_mended_configuration(call: Call, house: House) -> None:
    """The same command, with a file in conf/ mended: nothing was lost, so the job begins anew with it."""
    assert call(*PAIR, "dataset.bad=memory", multirun=True) == 1
    (folder,) = house.runs()
    config = read_run(folder)["config"]
    edit_run(folder, config={**config, "optimizer": {**config["optimizer"], "lam": 7.0}})
    assert call(*PAIR, "dataset.bad=memory", multirun=True) == 1
    assert read_run(folder)["config"]["optimizer"]["lam"] == 1.0
    assert (folder / "output.log").read_text().count("MemoryError:") == 2


def test_a_damaged_record_is_refused(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*PAIR, "seed=0,1", multirun=True) == 0
    folder = cell(house, "seed=0", "pair").folder
    (folder / "run.json").write_text('{"format": 1, "sta')
    assert call(*PAIR, "seed=0,1", multirun=True) == 2
    assert f"{folder.name}/run.json" in capsys.readouterr().err
    assert states(house, "pair") == ["failed", "done"]


def test_mixed_code_versions_are_said(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """H08: cells that other code wrote are counted by version, in the sweep and by sweep_status."""
    assert call(*PAIR, "seed=0,1", multirun=True) == 0
    folder = cell(house, "seed=0", "pair").folder
    edit_run(
        folder, starts=[{"git": {"commit": "1234567890abcdef", "dirty": True, "diff_sha256": "fedcba98"}}]
    )
    capsys.readouterr()
    assert call(*PAIR, "seed=0,1,2", multirun=True) == 0
    err = capsys.readouterr().err
    assert "mixed code versions in this sweep: 1 with 1234567890+fedcba, now unknown" in err
    done = house.script("scripts/sweep_status.py", "pair")
    assert "mixed code versions: 1234567890+fedcba, unknown" in done.stdout


def test_a_sweep_that_was_moved(call: Call, house: House) -> None:
    """The status is told wherever the folder lies; under its new name the command finds it again."""
    assert call(*PAIR, "seed=0,1", multirun=True) == 0
    old = sweep_of(house, "pair").path
    away = old.rename(house.root / "elsewhere")
    done = house.script("scripts/sweep_status.py", str(away))
    assert "2 jobs: 2 done" in done.stdout
    new = away.rename(old.with_name("renamed"))
    before = contents(new)
    assert call(*PAIR, "seed=0,1", "name=renamed", multirun=True) == 0
    assert [name for name, content in contents(new).items() if content[1] != before[name][1]] == []
    assert not old.exists()


def test_a_lost_sweep_json_is_written_anew(call: Call, house: House) -> None:
    """Also when no job is left to be done, as the message about a damaged one promises."""
    assert call(*PAIR, "seed=0,1", multirun=True) == 0
    before = contents(cell(house, "seed=0", "pair").folder)
    sweep_of(house, "pair").sweep_json.write_text("")
    assert call(*PAIR, "seed=0,1", multirun=True) == 2
    sweep_of(house, "pair").sweep_json.unlink()
    assert call(*PAIR, "seed=0,1", multirun=True) == 0
    assert states(house, "pair") == ["done", "done"]
    assert contents(cell(house, "seed=0", "pair").folder) == before


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("trainer.threads=1,2", "trainer.threads changes no result"),
        ("name=one,two", "name= names the whole sweep"),
        ("seed=glob(*)", "seed=glob(*) has no values, so that nothing would be run: glob() chooses"),
        ("seed=range(3,1)", "seed=range(3,1) has no values, so that nothing would be run: range("),
        ("name='a b'", "e.g. name=a_b"),
    ],
)
def test_an_axis_that_makes_no_jobs(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], axis: str, message: str
) -> None:
    assert call(*SMALL, axis, multirun=True) == 2
    assert message in capsys.readouterr().err
    assert not (house.root / "outputs").exists()
