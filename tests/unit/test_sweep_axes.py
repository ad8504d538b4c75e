"""The jobs of a sweep as lists of overrides: the command line, points, extension, what varies, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gramgn.errors import ConfigError
from gramgn.sweep import (
    axes_of,
    check_overrides,
    extended,
    grid_text,
    read_settings,
    with_points,
)

GRID = [("seed=0", "trainer=laptop"), ("seed=1", "trainer=laptop")]
Command = tuple[str, ...]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["seed=1", "seed=2,3"], "seed is given twice: seed=1 and seed=2,3"),
        (["optimizer.lam=0.1", "++optimizer.lam=1"], "optimizer.lam is given twice"),
        (["seed=1,1,2,2,3"], "names 1, 2 more than once"),
        (["seed=choice(1,1)"], "names 1 more than once"),
        (["optimizer.alpha=1,0.5,1.0,1e0"], "names 1, 1.0 more than once"),
        (["trainer.deterministic=true,True"], "more than once"),
        (["optimizer.engine=vmap,loop", "optimizer.engine.chunk_size=2"], "stands for the whole section"),
        (["optimizer.lam=interval(0,1)"], "names no values: give some, e.g. optimizer.lam=0.1,1,10"),
        (["seed=range(3,1)"], r"seed=range\(3,1\) has no values.* range\("),
    ],
)
def test_overrides_that_are_rejected(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_overrides(OverridesParser.create().parse_overrides(given))


def test_overrides_that_are_taken() -> None:
    check_overrides(
        OverridesParser.create().parse_overrides(["seed=0,1", "~dataset.limit", "+dataset.limit=3"])
    )


def test_points_are_taken_with_all_of_the_grid() -> None:
    points = read_settings(
        None, ["optimizer.lam=1 optimizer.alpha=0.1", "optimizer.lam=4"], None, None
    ).points
    assert with_points(points, GRID, ["trainer=laptop"]) == [
        ("optimizer.lam=1", "optimizer.alpha=0.1", *GRID[0]),
        ("optimizer.lam=1", "optimizer.alpha=0.1", *GRID[1]),
        ("optimizer.lam=4", *GRID[0]),
        ("optimizer.lam=4", *GRID[1]),
    ]
    assert with_points([], GRID, []) == GRID


def test_the_command_line_replaces_a_key_of_the_points() -> None:
    given = ["optimizer.lam=1 optimizer.alpha=0.1", "optimizer.lam=4 optimizer.alpha=0.1"]
    points = read_settings({}, given, None, 3).points
    jobs = with_points(points, [("optimizer.lam=9",)], ["optimizer.lam=9"])
    assert jobs == [("optimizer.alpha=0.1", "optimizer.lam=9")]


class Outcomes:
    """Runs jobs on paper: those that are not named diverge."""

    def __init__(self, finite: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        self.finite, self.failed = finite, failed
        self.launched: list[list[Command]] = []

    def __call__(self, jobs: Sequence[Command]) -> Mapping[Command, str]:
        self.launched.append(list(jobs))
        return {job: self.state(" ".join(sorted(job))) for job in jobs}

    def state(self, job: str) -> str:
        return "done" if job in self.finite else "failed" if job in self.failed else "diverged"


def test_a_column_without_a_finite_cell_is_extended_until_one_is() -> None:
    outcomes = Outcomes(finite=["alpha=1 lam=2", "alpha=100 lam=1"])
    grid = [(f"lam={lam}", f"alpha={alpha}") for lam in (1, 2) for alpha in (1, 3)]
    extended(grid, "alpha", ["10", "100", "1000"], outcomes)
    assert outcomes.launched[1:] == [[("alpha=10", "lam=1")], [("alpha=100", "lam=1")]]


def test_a_column_that_never_ends_finite_takes_all_values() -> None:
    outcomes = Outcomes()
    extended([("lam=1", "alpha=1"), ("lam=2", "alpha=1")], "alpha", ["10", "100"], outcomes)
    assert [len(jobs) for jobs in outcomes.launched] == [2, 2, 2]


def test_a_column_with_a_failed_cell_is_not_extended() -> None:
    """What a failed job would have done is not known: it is no reason to continue."""
    outcomes = Outcomes(failed=["alpha=1 lam=1"])
    extended([("lam=1", "alpha=1"), ("lam=1", "alpha=3")], "alpha", ["10"], outcomes)
    assert len(outcomes.launched) == 1


@pytest.mark.parametrize(
    "given", [{"key": "seed"}, {"key": "seed", "values": []}, "seed=1", {"key": 3, "values": [1]}]
)
def test_an_extension_that_is_none(given: object) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.extend=.*e\.g\. \{key: optimizer\.alpha"):
        read_settings(None, None, given, None)
    settings = read_settings(None, None, {"key": "a", "values": [1, 2.5]}, None)
    assert (settings.extended_key, settings.further_values) == ("a", ["1", "2.5"])


@pytest.mark.parametrize("given", ["seed=1", [3], [""], [["seed=1"]]])
def test_points_that_are_none(given: object) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.points=.*must be a list of overrides"):
        read_settings(None, given, None, None)


def test_other_settings_of_the_sweeper() -> None:
    for size in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="max_batch_size"):
            read_settings(None, None, None, size)
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.params"):
        read_settings(["seed=1"], None, None, None)


def test_what_varies() -> None:
    jobs = [("a=1", "b=x", "c=0"), ("a=2", "b=x"), ("a=1", "b=x", "c=0")]
    assert axes_of(jobs) == {"a": ["1", "2"], "c": ["0"]}
    assert axes_of(jobs[:1]) == {}


def test_the_text_of_a_grid() -> None:
    text = grid_text({"lam": ["1", "2"], "seed": ["0", "1", "2"]}, 6)
    assert text == "grid: lam = 1, 2 x seed = 0, 1, 2: 6 jobs"
    assert grid_text({"lam": ["1", "2"], "alpha": ["3"]}, 3) == "3 jobs over lam = 1, 2; alpha = 3"
    assert grid_text({}, 1) == "1 job"
    assert grid_text({"seed": [str(seed) for seed in range(40)]}, 40).endswith("11, ...: 40 jobs")
