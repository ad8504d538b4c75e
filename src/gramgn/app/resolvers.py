"""Values in `conf/` that are computed.

The network to start from and the best alpha of a grid come from finished runs below `outputs/`, the best learning rate
of gradient descent from the data and the network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gramgn.app.build import build, build_dataset
from gramgn.app.folders import run_dir, sweep_dir
from gramgn.app.paths import repository
from gramgn.errors import ConfigError, InputError, first_line
from gramgn.progress import say
from gramgn.records import RunFolder, best_alphas, final_loss, find_runs, path_override, runs

ANOTHER_START = "or give init_from=<run folder>, or init_from=null to start from weights that are not trained"
SYNTHETIC = "_synthetic"


def register_resolvers() -> None:
    """Make `${gramgn.run_dir:}` and the other computed values known to OmegaConf."""
    OmegaConf.register_new_resolver("gramgn.run_dir", run_dir, replace=True, use_cache=True)
    for resolver in (sweep_dir, trained, best_alpha, best_lr):
        OmegaConf.register_new_resolver(f"gramgn.{resolver.__name__}", resolver, replace=True)


def best_lr(*, _root_: DictConfig) -> float:
    """Return the learning rate with which full-batch gradient descent on the mean square converges fastest.

    It is n / (lambda_max + lambda_min) of G_0, for the configuration's own data, network and seed: n / 2 times
    `gramgn.theory.best_learning_rate`, which is about half the sum of squares.

    Raises:
        ConfigError: The network or the data are not those of the theory.
    """
    import torch

    from gramgn.theory import best_learning_rate, gram

    loaded = build_dataset(_plain(_root_.dataset)).load(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_root_.seed)
        model = build("model", _plain(_root_.model)).double()
    x = torch.from_numpy(loaded.images[loaded.split == "train"])
    try:
        return best_learning_rate(gram(model, x)) * len(x) / 2
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"optimizer.lr: there is a best learning rate for model=two_layer on vectors only ({first_line(error)}); "
            "give optimizer.lr=<number>"
        ) from error


def trained(experiment: str, *, _root_: DictConfig) -> str:
    """Return the folder of a finished run of an experiment to start from, relative to the repository.

    The run has the seed, scale and network of this configuration, and was trained on `warm_start.dataset` (on a
    synthetic data set: on the synthetic form of that one), in the sweep `warm_start.sweep` if that is given. Of
    several the oldest is taken, so that the same command finds the same one again.

    Args:
        experiment: Name of a file below `conf/experiment/`, e.g. `"fig1/afad_ggn_fixup"`.

    Raises:
        ConfigError: There is none, none that is finished, or it diverged; with the command that trains it.
    """
    dataset, sweep = (OmegaConf.select(_root_, f"warm_start.{key}") for key in ("dataset", "sweep"))
    if dataset is None:
        raise ConfigError(
            f"init_from: this run starts from a network of {experiment}, and warm_start.dataset does not say on "
            "which data set that was trained. Give warm_start.dataset=<its name>, "
            f"{ANOTHER_START}"
        )
    if _name(_root_.dataset).endswith(SYNTHETIC) and not dataset.endswith(SYNTHETIC):
        dataset += SYNTHETIC
    seed, scale = _root_.seed, _root_.trainer.scale
    found, others = _matching("experiment", experiment, dataset, _root_, seed=seed, sweep=sweep)
    by_state: dict[str, list[tuple[str, str]]] = {}
    for path, run in found.items():
        by_state.setdefault(run["state"], []).append((run["starts"][0]["time_utc"], _relative(path)))
    if "done" in by_state:
        _, oldest = min(by_state["done"])
        _say_once(f"starting from {oldest}, {experiment} of seed {seed} on {dataset}")
        return oldest
    what = f"{experiment} with seed {seed} at scale {scale} on {dataset}"
    command = f"python train.py experiment={experiment} dataset={dataset} trainer={scale} seed={seed}"
    if "diverged" in by_state:
        _, folder = min(by_state["diverged"])
        raise ConfigError(
            f"init_from: the run of {what} diverged ({folder}): no training can "
            f"start from it. Train one that does not, e.g. with a larger alpha or a smaller lr:\n  {command} "
            f"optimizer.<key>=<value>\n{ANOTHER_START}"
        )
    for state, ((_, folder), *_) in by_state.items():
        raise ConfigError(
            f"init_from: the run of {what} is not done (it is {state}). Finish it with the command that began it, "
            f"or with\n  python train.py {path_override('resume', folder)}\n{ANOTHER_START}"
        )
    where = f" in the sweep {sweep}" if sweep else ""
    raise ConfigError(
        f"init_from: there is no run of {what}{where} to start from{others}. "
        f"Train it with\n  {command}\n{ANOTHER_START}"
    )


def best_alpha(sweep: str, *, _root_: DictConfig) -> float:
    """Return the alpha that trained best in a finished grid, for the configuration's own lambda.

    The grid had the configuration's data set, scale and network; its number of images may be another one.
    See `gramgn.records.best_alphas` for the rule.

    Args:
        sweep: Name of a file in `conf/sweep/` that varies `optimizer.alpha`, e.g. `"lambda_alpha"`.

    Raises:
        ConfigError: There is no such grid, several, an unfinished one, or none of its cells is finite.
    """
    name, lam = OmegaConf.select(_root_, "best_alpha.sweep"), float(_root_.optimizer.lam)
    dataset, scale = _name(_root_.dataset), _root_.trainer.scale
    convention = _root_.optimizer.get("damping_convention")
    found, others = _matching(
        "sweep", sweep, dataset, _root_, lam=lam, damping_convention=convention, sweep=name
    )
    grids = sorted({path.parent for path in found})
    command = f"python train.py sweep={sweep} dataset={dataset} trainer={scale}"
    place = f"{dataset} at scale {scale}"
    if not grids:
        where = f" in {name}" if name else ""
        raise ConfigError(
            f"optimizer.alpha: there is no run of sweep={sweep} with lam={lam:g} on {place}{where} to take "
            f"the best alpha from{others}. Run the grid with\n  {command}\nor give optimizer.alpha=<number>"
        )
    if len(grids) > 1:
        raise ConfigError(
            f"optimizer.alpha: there are several grids of sweep={sweep} on {place}: "
            f"{', '.join(grid.name for grid in grids)}. Choose one with best_alpha.sweep=<its name>"
        )
    grid = _relative(grids[0])
    table = runs(grids[0], waiting=True, report=_say_once)
    losses = final_loss(table)["loss"]
    if left := int(losses.isna().sum()):
        raise ConfigError(
            f"optimizer.alpha: the grid {grid} is not finished ({left} of {len(losses)} jobs have no final loss), "
            f"so its best alpha is not known yet. Finish it with the command that began it, e.g.\n  {command}"
        )
    cells = table[table["folder"].isin([str(path) for path in found])]
    alpha = float(best_alphas(cells).get(lam, math.nan))
    if math.isnan(alpha):
        raise ConfigError(
            f"optimizer.alpha: every run with lam={lam:g} of the grid {grid} diverged, so there "
            "is no best alpha. Leave this point out, or give optimizer.alpha=<number>"
        )
    return alpha


def _matching(
    group: str, option: str, dataset: str, config: DictConfig, *, sweep: str | None, **wanted: Any
) -> tuple[dict[Path, Mapping[str, Any]], str]:
    """Find the runs below `outputs/` with a choice, a data set, the network and scale of a configuration.

    Args:
        group: `"experiment"` or `"sweep"`.
        option: The choice in that group.
        dataset: Name of the data set; its `_target_` where it has none.
        config: The configuration that asks.
        sweep: Folder name of the runs' sweep; None stands for any, or none.
        **wanted: Values of `seed`, or of keys of the optimizer; None stands for any.

    Returns:
        run.json by folder, and what there is instead for a message, e.g. `" (there are 3 of seed 1)"`.
    """
    found: dict[Path, Mapping[str, Any]] = {}
    others: Counter[str] = Counter()
    for folder in find_runs(repository() / "outputs"):
        try:
            run = _read(folder.path, folder.run_json.stat().st_mtime_ns)
        except InputError as error:
            _say_once(f"left out: {error}")
            continue
        if (run.get("choices") or {}).get(group) != option:
            continue
        was = run.get("config") or {}
        section, scale = was.get("dataset") or {}, (was.get("trainer") or {}).get("scale")
        # A user-defined data set may have no name in its section, only in what it loads.
        names = [
            name
            for name in ((run.get("dataset") or {}).get("name"), section.get("name"), section.get("_target_"))
            if name
        ]
        values = {"seed": was.get("seed"), **(was.get("optimizer") or {})}
        checks = {
            # The folder's name identifies the sweep, which may have been renamed or copied since.
            f"sweep {folder.path.parent.name}": sweep in (None, folder.path.parent.name),
            f"data set {next(iter(names), None)}": dataset in names,
            f"scale {scale}": scale == config.trainer.scale,
            **{f"{key} {values.get(key)}": value in (None, values.get(key)) for key, value in wanted.items()},
            "another network": was.get("model") == _plain(config.model),
        }
        misfit = next((what for what, fits in checks.items() if not fits), None)
        if misfit is None:
            found[folder.path] = run
        else:
            others[misfit] += 1
    seen = ", ".join(f"{count} of {what}" for what, count in others.most_common(4))
    return found, f" (there are {seen})" if seen else ""


@lru_cache(maxsize=4096)
def _read(path: Path, mtime_ns: int) -> Mapping[str, Any]:
    """Return run.json, read once as long as it stays the same: every cell of a sweep asks again."""
    return RunFolder(path).read_run()


@lru_cache(maxsize=4096)
def _say_once(message: str) -> None:
    """Write a line once per process: a configuration may be resolved several times."""
    say(message)


def _name(dataset: DictConfig) -> str:
    return str(dataset.get("name") or dataset.get("_target_"))


def _plain(section: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(section, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _relative(path: Path) -> str:
    return path.relative_to(repository()).as_posix()
