"""Named sweeps: points, an axis replaced on the command line, a column extended, and searches by other sweepers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from house import SMALL, Call, House, read_run
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from sweeps import states, sweep_of

pytestmark = pytest.mark.timeout(180)
TINY = (*SMALL, "trainer.epochs=1", "name=named")


def named(folder: Path, sweeper: dict[str, Any]) -> tuple[str, str]:
    """Write a named sweep into a folder of its own; return the overrides that choose it."""
    (folder / "sweep").mkdir()
    content = {"hydra": {"mode": "MULTIRUN", "sweeper": sweeper}}
    (folder / "sweep" / "mine.yaml").write_text("# @package _global_\n" + json.dumps(content))
    return f"hydra.searchpath=[file://{folder}]", "sweep=mine"


def settings(house: House, *keys: str) -> list[tuple[Any, ...]]:
    """Return those keys of the optimizer of every cell."""
    runs = [read_run(cell.folder) for cell in sweep_of(house, "named").cells()]
    return [tuple(run["config"]["optimizer"][key] for key in keys) for run in runs]


def test_points_with_an_axis(call: Call, house: House, tmp_path: Path) -> None:
    points = {"points": ["optimizer.lam=1 optimizer.alpha=0.5", "optimizer.lam=4"]}
    assert call(*TINY, *named(tmp_path, points), "seed=0,1") == 0
    assert settings(house, "lam") == [(1,), (1,), (4,), (4,)]
    assert [read_run(cell.folder)["seed"] for cell in sweep_of(house, "named").cells()] == [0, 1, 0, 1]


def test_a_value_of_the_command_line_replaces_one_of_the_points(
    call: Call, house: House, tmp_path: Path
) -> None:
    points = {"points": ["optimizer.lam=1 optimizer.alpha=0.5", "optimizer.lam=4 optimizer.alpha=0.5"]}
    assert call(*TINY, *named(tmp_path, points), "optimizer.lam=2") == 0
    assert settings(house, "lam", "alpha") == [(2, 0.5)]


def test_an_axis_of_the_command_line_replaces_that_of_the_sweep(
    call: Call, house: House, tmp_path: Path
) -> None:
    """Both comma lists and fixed values; other axes of the named sweep stay."""
    params = {"params": {"optimizer.lam": "1,2", "seed": "0,1,2"}}
    assert call(*TINY, *named(tmp_path, params), "seed=7") == 0
    assert settings(house, "lam") == [(1,), (2,)]
    assert {read_run(cell.folder)["seed"] for cell in sweep_of(house, "named").cells()} == {7}


def test_a_column_that_diverged_is_extended(call: Call, house: House, tmp_path: Path) -> None:
    """lr=1e30 diverges, with momentum 0 and 0.5: smaller ones are tried until one is finite, in each column."""
    sweeper = {
        "params": {"optimizer.lr": "1e30", "optimizer.momentum": "0.0,0.5"},
        "extend": {"key": "optimizer.lr", "values": [1e20, 0.001, 0.0001]},
    }
    assert call(*TINY, "optimizer=sgd", *named(tmp_path, sweeper)) == 0
    assert states(house, "named") == ["diverged"] * 4 + ["done"] * 2
    assert settings(house, "lr", "momentum")[-2:] == [(0.001, 0.0), (0.001, 0.5)]
    record = sweep_of(house, "named").read()
    assert record["axes"]["optimizer.lr"] == ["1e+30", "1e+20", "0.001"]
    assert len(record["starts"]) == 1


def test_nothing_is_extended_where_the_command_line_chose_the_axis(call: Call, house: House) -> None:
    extend = "hydra.sweeper.extend={key:optimizer.lr,values:[0.001]}"
    assert call(*TINY, "optimizer=sgd", "optimizer.lr=1e30", extend, multirun=True) == 0
    assert states(house, "named") == ["diverged"]


class Search(Sweeper):
    """A sweeper of somebody else's: one trial a launch, each chosen from what the last returned."""

    returned: Sequence[JobReturn] = ()

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        fixed = [each for each in arguments if not each.startswith("optimizer.lr=")]
        returned = []
        for number, rate in enumerate(("0.01", "1e30", "0.02")):
            found = self.launcher.launch([[f"optimizer.lr={rate}", *fixed]], initial_job_idx=number)
            returned += list(found)
        type(self).returned = returned


def test_a_search_gets_the_best_validation_loss(
    call: Call, house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep folder grows by a cell per launch; the loss of a trial that diverged is infinite, which can be ranked."""
    module = ModuleType("hydra_plugins.somebody")
    monkeypatch.setattr(Search, "__module__", module.__name__)
    monkeypatch.setattr(module, "Search", Search, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Plugins.instance().register(Search)
    (tmp_path / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "hydra" / "sweeper" / "search.yaml").write_text("_target_: hydra_plugins.somebody.Search\n")
    search = (f"hydra.searchpath=[file://{tmp_path}]", "hydra/sweeper=search")
    assert call(*TINY, "optimizer=sgd", *search, multirun=True) == 0
    assert states(house, "named") == ["done", "diverged", "done"]
    values = [job.return_value for job in Search.returned]
    best = [read_run(cell.folder)["best"] for cell in sweep_of(house, "named").cells()]
    assert values == [best[0]["val_loss"], float("inf"), best[2]["val_loss"]]
    assert [Path(str(job.working_dir)).parent.name for job in Search.returned] == ["named"] * 3
