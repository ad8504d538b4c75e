"""The table of runs, its queries, and the results CSV, which is the table on disk."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gramgn.errors import InputError
from gramgn.records import (
    RESULT_COLUMNS,
    RunFolder,
    SweepFolder,
    at_end,
    baselines,
    best_alphas,
    checkpoint_identity,
    differing,
    final_loss,
    loss_grid,
    newest,
    other_settings,
    runs,
    same_setting,
    settings,
    time_to_target,
    verdicts,
    with_seconds,
    write_results,
)

PUBLISHED = ("paper_laptop_synthetic.csv", "rotation_mednist_laptop.csv")


def record(
    *, seed: int = 0, optimizer: dict[str, Any] | None = None, epochs: int = 2, **entries: Any
) -> dict[str, Any]:
    """Return what run.json of a small run holds."""
    return {
        "state": "done",
        "choices": {"experiment": "fig2/x", "sweep": "lambda_alpha"},
        "dataset": {
            "name": "rsna",
            "kind": "real",
            "unit": "months",
            "image_size": 32,
            "manifest_sha256": "ab" * 32,
            "summary": {"used": 100},
        },
        "model": {"name": "resnet_fixup"},
        "optimizer": {"name": "ggn", "alpha_sum": 12.8},
        "config": {
            "seed": seed,
            "name": "x",
            "init_from": None,
            "tracking": {"mode": "none"},
            "dataset": {"root": "data/raw/rsna", "workers": 2},
            "model": {"depth": 14},
            "optimizer": {
                "lr": 1.0,
                "lam": 1.0,
                "alpha": 0.1,
                "damping_convention": "mean",
                **(optimizer or {}),
            },
            "trainer": {"epochs": epochs, "scale": "laptop", "batch_size": 128, "standardize_targets": True},
        },
        "seed": seed,
        "threads": 2,
        "device": {"kind": "cpu", "name": "Abacus 2000"},
        "starts": [{"time_utc": "2026-01-01T00:00:00Z", "git": {"commit": "c0ffee" * 7}}],
        "git": {"commit": "c0ffee" * 7},
        "versions": {"torch": "2.14.1"},
        **entries,
    }


def add(path: Path, losses: Sequence[float], **entries: Any) -> RunFolder:
    """Write a run with these training losses."""
    folder = RunFolder.create(path)
    folder.write_run(record(**entries))
    for epoch, loss in enumerate(losses, start=1):
        folder.append_metrics(
            {"epoch": epoch, "step": 10 * epoch, "train_s": 1.5 * epoch, "train_loss": loss}
        )
    return folder


def grid(root: Path, cells: dict[tuple[float, float], Sequence[float]]) -> pd.DataFrame:
    """Return the table of a sweep with these final losses per lambda and alpha, one per seed; NaN diverged."""
    for (lam, alpha), losses in cells.items():
        for seed, loss in enumerate(losses):
            add(
                root / f"{lam}-{alpha}-{seed}",
                [9.0, 9.0 if math.isnan(loss) else loss],
                seed=seed,
                optimizer={"lam": lam, "alpha": alpha},
                state="diverged" if math.isnan(loss) else "done",
            )
    return runs(root)


def test_a_row_per_run_and_epoch(tmp_path: Path) -> None:
    add(tmp_path / "b" / "one", [0.5, 0.25], seed=3)
    add(tmp_path / "a", [], state="failed", error={"type": "ValueError", "message": "why"})
    table = runs(tmp_path)
    assert list(table["run"]) == ["a", "b/one", "b/one"]
    assert list(table["epoch"].fillna(0)) == [0, 1, 2]
    first, last = table.iloc[0], table.iloc[-1]
    assert (first["state"], first["error"]) == ("failed", "ValueError: why")
    assert (last["seed"], last["lam"], last["train_loss"], last["step"]) == (3, 1.0, 0.25, 20)
    assert (last["git"], last["manifest"], last["folder"]) == (
        "c0ffeec0ffee",
        "ab" * 6,
        str(tmp_path / "b" / "one"),
    )
    assert not set(RESULT_COLUMNS) - set(table.columns)


def test_an_epochs_own_alpha_is_no_setting(tmp_path: Path) -> None:
    folder = add(tmp_path / "a", [])
    folder.append_metrics({"epoch": 1, "alpha": 0.4, "alpha_sum": 51.2})
    row = runs(tmp_path).iloc[0]
    assert (row["alpha"], row["epoch_alpha"]) == (0.1, 0.4)
    assert (row["alpha_sum"], row["epoch_alpha_sum"]) == (12.8, 51.2)


def test_of_an_epoch_written_twice_the_last_row_counts(tmp_path: Path) -> None:
    add(tmp_path / "a", [0.5, 0.4]).append_metrics({"epoch": 2, "train_loss": 0.3})
    assert list(runs(tmp_path)["train_loss"]) == [0.5, 0.3]


def test_damaged_runs_are_named_and_left_out(tmp_path: Path) -> None:
    """F01: a damaged run.json and a metrics file that was cut in mid-line."""
    add(tmp_path / "a", [0.5])
    add(tmp_path / "b", [0.5]).run_json.write_text("{")
    with add(tmp_path / "c", [0.5]).metrics_csv.open("a") as file:
        file.write("2,0.1")
    add(tmp_path / "d", [0.5]).update_run(starts=[1])
    for name, at in (("e", 0), ("f", -1)):
        folder = add(tmp_path / name, [0.5])
        pipe = (folder.run_json, folder.metrics_csv)[at]
        pipe.unlink()
        os.mkfifo(pipe)  # reading it would never end
    twice = add(tmp_path / "g", [0.5])
    twice.metrics_csv.write_text("epoch,train_loss,train_loss\n1,5,6\n")
    said: list[str] = []
    assert list(runs(tmp_path, report=said.append)["run"]) == ["a"]
    assert "run.json is damaged" in said[0]
    assert "line 3 is damaged" in said[1]
    assert "its entry 'starts' holds '1', not a mapping" in said[2]
    assert "run.json: not a regular file" in said[3]
    assert "metrics.csv: not a regular file" in said[4]
    assert "has a column twice" in said[5]


def test_a_missing_folder_holds_no_runs(tmp_path: Path) -> None:
    table = runs(tmp_path / "nowhere")
    assert table.empty
    assert final_loss(table).empty
    assert loss_grid(table).empty
    assert best_alphas(table).empty
    assert newest(table).empty


def test_jobs_that_have_not_begun(tmp_path: Path) -> None:
    add(tmp_path / "s" / "a", [0.5, 0.4])
    cells = [{"folder": "a"}, {"folder": "b", "overrides": ["optimizer.alpha=3", "seed=7"]}]
    SweepFolder(tmp_path / "s").write({"cells": cells})
    assert set(runs(tmp_path)["run"]) == {"s/a"}
    waiting = runs(tmp_path, waiting=True).iloc[-1]
    assert (waiting["run"], waiting["state"]) == ("s/b", "waiting")
    assert (waiting["lam"], waiting["alpha"], waiting["seed"]) == (1.0, 3.0, 7)
    assert pd.isna(waiting["epoch"])


def test_the_loss_of_a_run(tmp_path: Path) -> None:
    """That of its last planned epoch: infinite if it diverged, missing if it has not ended or lost that row."""
    add(tmp_path / "done", [0.5, 0.4])
    add(tmp_path / "earlier", [0.5, 0.4], state="diverged", epochs=9)
    add(tmp_path / "lost", [0.5])
    add(tmp_path / "nan", [0.5, math.nan])
    add(tmp_path / "running", [0.5, 0.4], state="running")
    table = runs(tmp_path)
    found = final_loss(table).set_index("run")["loss"].to_dict()
    assert [found[name] for name in ("done", "earlier", "nan")] == [0.4, math.inf, math.inf]
    assert math.isnan(found["lost"])
    assert math.isnan(found["running"])
    assert final_loss(table, epoch=1).set_index("run")["loss"]["done"] == 0.5


@pytest.mark.parametrize(
    ("cells", "best"),
    [
        ({1.0: [0.5], 3.0: [0.2], 10.0: [0.4]}, 3.0),
        ({1.0: [0.2], 3.0: [0.2], 0.1: [0.2]}, 3.0),
        ({1.0: [0.0, 0.3, 0.3], 3.0: [0.2, 0.2, 9.0]}, 3.0),
        ({1.0: [0.1, math.nan], 3.0: [0.2, 0.2]}, 3.0),
        ({1.0: [math.nan]}, math.nan),
    ],
)
def test_the_best_alpha(tmp_path: Path, cells: dict[float, list[float]], best: float) -> None:
    """Least loss; median over seeds; of equals the larger alpha; never one with a seed that diverged."""
    table = grid(tmp_path, {(1.0, alpha): losses for alpha, losses in cells.items()})
    assert best_alphas(table).to_dict() == pytest.approx({1.0: best}, nan_ok=True)


def test_the_grid_of_a_sweep(tmp_path: Path) -> None:
    table = grid(tmp_path, {(1.0, 0.1): [0.3, 0.1], (1.0, 1.0): [0.4, math.nan], (2.0, 0.1): [math.nan]})
    found = loss_grid(table)
    assert (list(found.index), list(found.columns)) == ([1.0, 0.1], [1.0, 2.0])
    assert found.loc[0.1, 1.0] == 0.2
    assert (found.loc[1.0, 1.0], found.loc[0.1, 2.0]) == (math.inf, math.inf)
    assert math.isnan(float(str(found.loc[1.0, 2.0])))


def test_published_numbers(repository: Path) -> None:
    """Figure 2c's best alphas and figure 1's final medians, by the queries that a notebook would use."""
    table = runs(repository / "outputs" / "results" / PUBLISHED[0])
    best = best_alphas(table[table["sweep"] == "lambda_alpha"])
    assert best.to_dict() == {0.25: 3.0, 0.5: 1.0, 1.0: 0.3, 2.0: 0.03, 4.0: 0.03}
    curve = table[(table["experiment"] == "fig1/rsna_ggn_fixup") & table["sweep"].isna()]
    assert 0.01 < final_loss(curve)["loss"].median() < 0.1


@pytest.mark.parametrize("name", PUBLISHED)
def test_results_files_are_byte_stable(repository: Path, tmp_path: Path, name: str) -> None:
    """F14: write, read, write gives the same bytes, and every float reads back exactly."""
    table = runs(repository / "outputs" / "results" / name)
    write_results(table, tmp_path / "a.csv")
    again = runs(tmp_path / "a.csv")
    columns = [column for column in table.columns if column != "source"]
    pd.testing.assert_frame_equal(again[columns], table[columns], check_exact=True)
    write_results(again, tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def runs_at_end(losses: dict[tuple[str, int], tuple[float, ...]]) -> pd.DataFrame:
    """Return `at_end` of runs with these validation losses, by optimizer and epochs, one per seed."""
    rows = [
        {"run": f"{name}{length}{seed}", "seed": seed, "optimizer": name, "model": "net", "epochs": length}
        | {"epoch": length, "val_loss": loss, "train_loss": 1 - loss, "test_mae": loss}
        | {"train_s": 10.0 * length * (2 if name == "slow" else 1), "source": "x"}
        | {"state": "diverged" if loss == math.inf else "done"}
        for (name, length), values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return at_end(pd.DataFrame(rows).reindex(columns=runs("nowhere").columns))


def test_time_to_target() -> None:
    """Medians over seeds at the end of each length; a method that never arrives has no time."""
    ends = runs_at_end(
        {
            ("sgd", 3): (0.9, 0.9, 0.2),
            ("sgd", 9): (0.5, 0.6, 0.4),
            ("adamw", 3): (0.8, 0.8, 0.8),
            ("adamw", 9): (0.7, 0.7, 0.7),
            ("ggn", 3): (0.5, 0.4, math.inf),
            ("ggn", 9): (0.3, 0.3, 0.3),
        }
    )
    ours = ["ggn on net"]
    assert baselines(ends, ours=ours) == [("sgd on net", 9), ("adamw on net", 9)]
    found = time_to_target(ends, ours=ours)
    assert found.attrs["target"] == 0.5
    assert found.loc["ggn on net"].tolist() == [3, 30, pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert found.loc["sgd on net"].tolist() == [9, 90, 1, 1]
    assert found.loc["adamw on net"].isna().all()
    assert time_to_target(ends, ours=ours, column="train_loss").loc["adamw on net", "epochs"] == 3


@pytest.mark.parametrize(
    ("name", "third", "whole", "answers"),
    [
        ("ggn", (0.4, 0.3, 0.4), (0.2, 0.2, 0.2), ["ahead", "ahead", "ahead"]),
        # One seed is level, and 2 % of the test error is too little.
        ("ggn", (0.498, 0.499, 0.5), (0.49, 0.49, 0.49), ["even", "even", "even"]),
        ("ggn", (0.6, math.inf, 0.7), (0.6, 0.6, 0.6), ["behind", "behind", "behind"]),
        ("ggn", (0.4, math.inf, 0.4), (0.2, 0.2, 0.2), ["even", "even", "ahead"]),
        ("slow", (0.4, 0.3, 0.4), (0.2, 0.2, 0.2), ["ahead", "none of its budgets is at most half", "ahead"]),
    ],
)
def test_verdicts(name: str, third: tuple[float, ...], whole: tuple[float, ...], answers: list[str]) -> None:
    """The rules of docs/protocol.md: all seeds agree, at a third of the epochs, half of the seconds, and at the end."""
    baseline = {("sgd", 3): (0.9, 0.9, 0.9), ("sgd", 9): (0.5, 0.5, 0.5)}
    ends = runs_at_end(baseline | {(name, 3): third, (name, 9): whole})
    found = verdicts(ends, f"{name} on net", ours=[f"{name} on net"])
    assert [each.question for each in found] == ["per epoch", "per second", "at the end"]
    for each, answer in zip(found, answers, strict=True):
        assert each.answer.startswith(answer)
    assert found[0].differences == {seed: loss - 0.5 for seed, loss in enumerate(third)}
    assert (found[2].epochs, found[2].baseline_epochs) == (9, 9)
    short = runs_at_end({("sgd", 3): (0.5,), (name, 3): (0.4,)})
    assert "a third" in verdicts(short, f"{name} on net", ours=[f"{name} on net"])[0].answer


def test_seconds_are_those_of_the_clock() -> None:
    """The first epoch's seconds once, the second's for every other; none where nothing was measured.

    Of the three clock runs the one that diverged counts nowhere, and seed 3 takes number 3 mod 2.
    """
    columns = runs("nowhere").columns
    rows = [{"lr": lr, "seed": 3, "epoch": epoch, "train_s": 77.0} for lr in (0.1, 0.2) for epoch in (1, 4)]
    clock = [
        {"lr": 0.1, "seed": seed, "run": f"{seed}", "state": state, "epoch": epoch, "train_s": seconds}
        for seed, state, times in ((2, "done", (5, 8)), (1, "diverged", (1, 1.1)), (0, "done", (6, 8)))
        for epoch, seconds in enumerate(times, 1)
    ]
    table, timed = (
        pd.DataFrame(each).reindex(columns=columns).assign(epochs=length, dataset="faces", scale="desk")
        for each, length in ((rows, 4), (clock, 2))
    )
    assert with_seconds(table, timed)["train_s"].tolist()[:2] == [5.0, 14.0]
    assert with_seconds(table, timed)["train_s"].isna().tolist() == [False, False, True, True]
    assert with_seconds(table, timed.assign(scale="laptop"))["train_s"].isna().all()


def test_a_schedule_has_columns_in_files_that_need_them(tmp_path: Path) -> None:
    table = grid(tmp_path / "runs", {(1.0, 0.1): [0.5]})
    for shape, expected in (("constant", False), ("linear", True)):
        write_results(table.assign(schedule=shape, average_val_loss=math.nan), tmp_path / "results.csv")
        again = runs(tmp_path / "results.csv")
        assert ("schedule" in (tmp_path / "results.csv").read_text().splitlines()[0].split(",")) == expected
        assert set(again["schedule"].dropna()) == ({shape} if expected else set())


def test_runs_and_their_csv_give_the_same_answers(tmp_path: Path) -> None:
    table = grid(tmp_path / "runs", {(1.0, 0.1): [1 / 3, 0.1], (2.0, 0.1): [math.nan]})
    write_results(table, tmp_path / "results.csv")
    again = runs(tmp_path / "results.csv")
    columns = list(RESULT_COLUMNS)
    key = ["run", "epoch"]
    pd.testing.assert_frame_equal(
        again[columns].sort_values(key, ignore_index=True), table[columns].sort_values(key, ignore_index=True)
    )
    pd.testing.assert_frame_equal(loss_grid(again), loss_grid(table))
    assert set(same_setting(again)) == set(same_setting(table))
    assert again["folder"].isna().all()
    assert set(again["code"]) == {"c0ffeec0ff"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("image_size,", "", 1), "lacks image_size"),
        (
            lambda text: text.replace("experiment,", "experiments,", 1),
            "lacks experiment; 'experiments' is unknown",
        ),
        (
            lambda text: text.replace(",done,0,", ",done,zero,", 1),
            "line 2, column seed: 'zero' is not a whole number",
        ),
        (
            lambda text: text.replace(",0.5,", ",half,", 1),
            "line 2, column train_loss: 'half' is not a number",
        ),
        (lambda text: text + text.splitlines()[-1] + "\n", "line 4, run a: the row occurs twice"),
        (lambda text: text.replace(",done,", ",finished,"), "line 2, run a: the state 'finished' is unknown"),
        (lambda text: text.replace(",done,", ",,", 1), "line 2, run a: the state"),
        (lambda text: text[:-5], "cut in mid-line"),
        (lambda text: "", "is cut in mid-line"),
        (lambda text: "a,b\n", "is not a results file: it lacks experiment"),
    ],
)
def test_what_is_not_a_results_file(tmp_path: Path, change: Any, message: str) -> None:
    add(tmp_path / "a", [0.5, 0.25])
    path = tmp_path / "results.csv"
    write_results(runs(tmp_path), path)
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=message) as raised:
        runs(path)
    assert str(path) in str(raised.value)


def test_seeds_of_one_setting(tmp_path: Path) -> None:
    """What is recorded as 1 equals 1.0; the seed, the location of the data and names make no other setting."""
    add(tmp_path / "a", [0.5])
    add(tmp_path / "b", [0.5], seed=1, optimizer={"lam": 1})
    moved = record(seed=2)
    moved["config"] |= {
        "dataset": {"root": "elsewhere", "workers": 8},
        "name": "y",
        "tracking": {"mode": "online"},
    }
    RunFolder.create(tmp_path / "c").write_run(moved)
    add(tmp_path / "d", [0.5], optimizer={"lam": 2.0})
    add(tmp_path / "e", [0.5], optimizer={"spring": 0.9})
    table = runs(tmp_path)
    keys = dict(zip(table["run"], same_setting(table), strict=True))
    assert keys["a"] == keys["b"] == keys["c"]
    assert len({keys["a"], keys["d"], keys["e"]}) == 3
    without = dict(zip(table["run"], same_setting(table, "lam"), strict=True))
    assert without["a"] == without["d"] != without["e"]


def test_a_repeated_run_counts_once(tmp_path: Path) -> None:
    """Of runs with the same settings, data and seed the newest is shown; an unfinished one only if none is."""
    add(tmp_path / "old", [0.5], starts=[{"time_utc": "2026-01-01T00:00:00Z"}])
    add(tmp_path / "new", [0.4], starts=[{"time_utc": "2026-02-01T00:00:00Z"}])
    add(tmp_path / "killed", [0.4], state="running")
    add(tmp_path / "killed-2", [0.4], state="running", seed=2)
    add(tmp_path / "other", [0.4], seed=1)
    assert list(newest(runs(tmp_path))["run"]) == ["killed-2", "new", "other"]


def test_what_may_differ() -> None:
    """One list decides: a job of a sweep, the checkpoints of a run, and the seeds of an experiment."""
    one = record() | {"id": "a"}

    def changed(section: str, **values: Any) -> dict[str, Any]:
        return one | {"config": one["config"] | {section: {**one["config"][section], **values}}}

    threads, longer, root = (
        changed("trainer", threads=4),
        changed("trainer", epochs=9),
        changed("dataset", root="x"),
    )
    seed = one | {"config": one["config"] | {"seed": 5}, "seed": 5}
    same_job = [not differing(each["config"], one["config"]) for each in (threads, longer, root, seed)]
    assert same_job == [True, False, False, False]
    same_run = [
        checkpoint_identity(each) == checkpoint_identity(one) for each in (threads, longer, root, seed)
    ]
    assert same_run == [True, True, False, False]
    same = [settings(each) == settings(one) for each in (threads, longer, root, seed)]
    assert same == [True, False, True, True]
    assert other_settings(longer) == other_settings(one)
    rates = [changed("optimizer", lr=rates) for rates in ([0.1], [0.2])]
    assert len({other_settings(each) for each in (one, *rates)}) == 3
    assert differing(one["config"], longer["config"]) == {"trainer.epochs": (2, 9)}


def test_folders_and_files_together(tmp_path: Path) -> None:
    add(tmp_path / "x" / "a", [0.5])
    write_results(runs(tmp_path / "x"), tmp_path / "results.csv")
    shutil.rmtree(tmp_path / "x" / "a")
    add(tmp_path / "x" / "b", [0.25])
    assert list(runs(tmp_path / "x", tmp_path / "results.csv")["train_loss"]) == [0.25, 0.5]


def test_the_same_name_in_two_files_is_two_runs(tmp_path: Path) -> None:
    """The newest of them counts; a run and its copy in a CSV count once."""
    add(tmp_path / "x" / "a", [0.5, 0.4])
    write_results(runs(tmp_path / "x"), tmp_path / "x.csv")
    add(tmp_path / "y" / "a", [0.5, 0.3], starts=[{"time_utc": "2026-02-01T00:00:00Z"}])
    write_results(runs(tmp_path / "y"), tmp_path / "y.csv")
    table = runs(tmp_path / "y.csv", tmp_path / "x.csv", tmp_path / "y.csv")
    assert len(table) == 4
    assert final_loss(table)["loss"].tolist() == [0.3, 0.4]
    assert newest(table)["train_loss"].tolist() == [0.5, 0.3]
    assert len(newest(runs(tmp_path / "x", tmp_path / "x.csv"))) == 2


def test_the_page_describes_every_column(repository: Path) -> None:
    page = (repository / "outputs" / "results" / "README.md").read_text()
    assert set(RESULT_COLUMNS) <= set(re.findall(r"`(\w+)`", page))
