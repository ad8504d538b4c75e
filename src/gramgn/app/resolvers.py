"""Values in `conf/` that are computed.

The network to start from and the best alpha of a grid come from finished runs below `outputs/`, the best learning rate
of gradient descent from the data and the network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gramgn.app.build import build, build_dataset
from gramgn.app.paths import repository
from gramgn.errors import ConfigError, InputError, first_line
from gramgn.progress import say
from gramgn.records import ENDED, RunFolder, best_alphas, final_loss, find_runs, path_override, runs

SYNTHETIC = "_synthetic"


@dataclass(frozen=True)
class Wanted:
    """What a run must have been to be used.

    Attributes:
        dataset: Name of its data set, e.g. `"afad_synthetic"`; its `_target_` where it has none.
        scale: Its `trainer.scale`.
        model: Its whole `model` section: only the same network's weights fit.
        seed: Its seed; None: any.
        lam: Its lambda; None: any.
        convention: Its `damping_convention`, in which an alpha of its is meant; None: any.
        sweep: Folder name of its sweep; None: any, or none.
    """

    dataset: str
    scale: str
    model: Mapping[str, Any]
    seed: int | None = None
    lam: float | None = None
    convention: str | None = None
    sweep: str | None = None

    def misfit(self, path: Path, run: Mapping[str, Any]) -> str | None:
        """Return in what a run differs, e.g. `"seed 1"`; None if in nothing.

        Args:
            path: Its folder, which tells its sweep: that may have been renamed or copied since.
            run: Its run.json.
        """
        config = run.get("config") or {}
        section, scale = config.get("dataset") or {}, (config.get("trainer") or {}).get("scale")
        # A data set of the user's may have no name in its section, only in what it loads.
        known = (run.get("dataset") or {}).get("name"), section.get("name"), section.get("_target_")
        optimizer = config.get("optimizer") or {}
        if self.sweep is not None and path.parent.name != self.sweep:
            return f"sweep {path.parent.name}"
        if self.dataset not in known:
            return f"data set {next((name for name in known if name), None)}"
        if scale != self.scale:
            return f"scale {scale}"
        if self.seed is not None and config.get("seed") != self.seed:
            return f"seed {config.get('seed')}"
        if self.lam is not None and optimizer.get("lam") != self.lam:
            return f"lambda {optimizer.get('lam')}"
        if self.convention is not None and optimizer.get("damping_convention") != self.convention:
            return f"damping_convention {optimizer.get('damping_convention')}"
        return None if config.get("model") == self.model else "another network"


def register_run_resolvers() -> None:
    """Register `${gramgn.trained:<experiment>}`, `${gramgn.best_alpha:<sweep>}` and `${gramgn.best_lr:}`."""
    OmegaConf.register_new_resolver("gramgn.trained", trained, replace=True)
    OmegaConf.register_new_resolver("gramgn.best_alpha", best_alpha, replace=True)
    OmegaConf.register_new_resolver("gramgn.best_lr", best_lr, replace=True)


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

    It has the seed, scale and network of the configuration that asks, and was trained on `warm_start.dataset`
    (on a synthetic data set: on the synthetic form of that one), in the sweep `warm_start.sweep` if that is given.
    Of several the oldest is taken, so that the same command finds the same one again.

    Args:
        experiment: Name of a file below `conf/experiment/`, e.g. `"fig1/afad_ggn_fixup"`.

    Raises:
        ConfigError: If there is none, or none that is finished, or it diverged; with the command that makes it.
    """
    dataset = OmegaConf.select(_root_, "warm_start.dataset")
    if dataset is None:
        raise ConfigError(
            f"init_from: this run starts from a network of {experiment}, and warm_start.dataset does not say on "
            "which data set that was trained. Give warm_start.dataset=<its name>, or init_from=<run folder>"
        )
    if _name(_root_.dataset).endswith(SYNTHETIC) and not dataset.endswith(SYNTHETIC):
        dataset += SYNTHETIC
    sweep = OmegaConf.select(_root_, "warm_start.sweep")
    wanted = Wanted(dataset, _root_.trainer.scale, _plain(_root_.model), seed=_root_.seed, sweep=sweep)
    path = find_trained(experiment, wanted, repository() / "outputs")
    found = path.relative_to(repository()).as_posix()
    _say_once(f"starting from {found}, {experiment} of seed {wanted.seed} on {dataset}")
    return found


def find_trained(experiment: str, wanted: Wanted, outputs: Path) -> Path:
    """Return the folder of the oldest finished run of `experiment` that fits.

    Args:
        experiment: `choices.experiment` of the run.
        wanted: What it must have been.
        outputs: Folder to search.

    Raises:
        ConfigError: If there is none.
    """
    fitting: dict[str, list[tuple[str, Path]]] = {}
    others: Counter[str] = Counter()
    for path, run in _runs(outputs):
        if (run.get("choices") or {}).get("experiment") != experiment:
            continue
        if (misfit := wanted.misfit(path, run)) is not None:
            others[misfit] += 1
        else:
            fitting.setdefault(run["state"], []).append((run["starts"][0]["time_utc"], path))
    if "done" in fitting:
        return min(fitting["done"])[1]
    what = f"{experiment} with seed {wanted.seed} at scale {wanted.scale} on {wanted.dataset}"
    command = (
        f"python train.py experiment={experiment} dataset={wanted.dataset} trainer={wanted.scale} "
        f"seed={wanted.seed}"
    )
    if "diverged" in fitting:
        raise ConfigError(
            f"init_from: the run of {what} diverged ({_relative(min(fitting['diverged'])[1])}): no training can "
            f"start from it. Train one that does not, e.g. with a larger alpha or a smaller lr:\n  {command} "
            "optimizer.<key>=<value>\nor give init_from=<run folder>"
        )
    if fitting:
        state, (first, *_) = next(iter(fitting.items()))
        raise ConfigError(
            f"init_from: the run of {what} is not done (it is {state}). Finish it with the command that began it, "
            f"or with\n  python train.py {path_override('resume', _relative(first[1]))}"
        )
    where = f" in the sweep {wanted.sweep}" if wanted.sweep else ""
    raise ConfigError(
        f"init_from: there is no run of {what}{where} to start from{_seen(others)}. "
        f"Make it with\n  {command}\nor give init_from=<run folder>"
    )


def best_alpha(sweep: str, *, _root_: DictConfig) -> float:
    """Return the alpha that trained best in a finished grid, for the configuration's own lambda.

    The grid had the configuration's data set, scale and network; its number of images may be another one.
    See `gramgn.records.best_alphas` for the rule.

    Args:
        sweep: Name of a file in `conf/sweep/` that varies `optimizer.alpha`, e.g. `"lambda_alpha"`.

    Raises:
        ConfigError: If there is no such grid, several, an unfinished one, or none of its cells is finite.
    """
    folder = OmegaConf.select(_root_, "best_alpha.sweep")
    lam, scale, dataset = float(_root_.optimizer.lam), _root_.trainer.scale, _name(_root_.dataset)
    convention = _root_.optimizer.get("damping_convention")
    wanted = Wanted(dataset, scale, _plain(_root_.model), lam=lam, convention=convention, sweep=folder)
    alpha, grid = find_best_alpha(sweep, wanted, repository() / "outputs")
    _say_once(f"alpha={alpha:g} for lam={lam:g}: the best of {_relative(grid)}")
    return alpha


def find_best_alpha(sweep: str, wanted: Wanted, outputs: Path) -> tuple[float, Path]:
    """Return the best alpha of the one grid that fits, and the folder of that grid.

    Args:
        sweep: `choices.sweep` of its runs.
        wanted: What they must have been.
        outputs: Folder to search.

    Raises:
        ConfigError: If there is no such grid, several, an unfinished one, or none of its cells is finite.
    """
    grids: dict[Path, list[tuple[Path, Mapping[str, Any]]]] = {}
    others: Counter[str] = Counter()
    for path, run in _runs(outputs):
        if (run.get("choices") or {}).get("sweep") != sweep:
            continue
        if (misfit := wanted.misfit(path, run)) is not None:
            others[misfit] += 1
        else:
            grids.setdefault(path.parent, []).append((path, run))
    command = f"python train.py sweep={sweep} dataset={wanted.dataset} trainer={wanted.scale}"
    place = f"{wanted.dataset} at scale {wanted.scale}"
    if not grids:
        where = f" in {wanted.sweep}" if wanted.sweep else ""
        raise ConfigError(
            f"optimizer.alpha: there is no run of sweep={sweep} with lam={wanted.lam:g} on {place}{where} to take "
            f"the best alpha from{_seen(others)}. Make the grid with\n  {command}\nor give optimizer.alpha=<number>"
        )
    if len(grids) > 1:
        names = ", ".join(sorted(grid.name for grid in grids))
        raise ConfigError(
            f"optimizer.alpha: there are several grids of sweep={sweep} on {place}: {names}. "
            "Choose one with best_alpha.sweep=<its name>"
        )
    ((grid, cells),) = grids.items()
    table = runs(grid, waiting=True, report=_say_once)
    jobs = table.drop_duplicates("folder")
    if left := int((~jobs["state"].isin(ENDED)).sum()):
        raise ConfigError(
            f"optimizer.alpha: the grid {_relative(grid)} is not finished ({left} of {len(jobs)} jobs have not ended), "
            f"so its best alpha is not known yet. Finish it with the command that began it, e.g.\n  {command}"
        )
    table = table[table["folder"].isin([str(path) for path, _ in cells])]
    losses = final_loss(table)
    if not (lost := losses[losses["loss"].isna()]).empty:
        raise InputError(
            f"{Path(lost['folder'].iloc[0]) / 'metrics.csv'} has no training loss of the last epoch, although the run "
            "is done: put the file back, or remove the run's folder and repeat the grid"
        )
    alpha = float(best_alphas(table).get(wanted.lam, math.nan))
    if math.isnan(alpha):
        raise ConfigError(
            f"optimizer.alpha: every run with lam={wanted.lam:g} of the grid {_relative(grid)} diverged, so there "
            "is no best alpha. Leave this point out, or give optimizer.alpha=<number>"
        )
    return alpha, grid


def _runs(outputs: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield folder and run.json of all runs below a folder; a damaged one is named and left out."""
    for run in find_runs(outputs):
        stat = run.run_json.stat()
        try:
            yield run.path, _read(run.path, stat.st_mtime_ns, stat.st_size)
        except InputError as error:
            _say_once(f"left out: {error}")


@lru_cache(maxsize=4096)
def _read(path: Path, mtime_ns: int, size: int) -> Mapping[str, Any]:
    """Return run.json, read once as long as it stays the same: every cell of a sweep asks again."""
    return RunFolder(path).read_run()


@lru_cache(maxsize=4096)
def _say_once(message: str) -> None:
    """Say a line once a process: a value is resolved each time that its configuration is."""
    say(message)


def _seen(others: Counter[str]) -> str:
    """Say what there is instead, e.g. `" (there are 3 of seed 1)"`; nothing if there is nothing."""
    seen = ", ".join(f"{count} of {misfit}" for misfit, count in others.most_common(4))
    return f" (there are {seen})" if seen else ""


def _name(dataset: DictConfig) -> str:
    return str(dataset.get("name") or dataset.get("_target_"))


def _plain(section: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(section, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _relative(path: Path) -> str:
    return path.relative_to(repository()).as_posix() if path.is_relative_to(repository()) else str(path)
