"""Every experiment and every named sweep composes, means what its name says, and is what the paper asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from gramgn.app import (
    check_entries,
    plain,
    register_resolvers,
    run_entries,
    set_repository,
    split_paths,
)

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
ALL_EXPERIMENTS = sorted(
    path.relative_to(CONF / "experiment").with_suffix("").as_posix()
    for path in (CONF / "experiment").rglob("*.yaml")
)
EXPERIMENTS = [name for name in ALL_EXPERIMENTS if name.split("/")[0] in ("fig1", "fig2", "ours")]
SWEEPS = sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))
MODEL_OF = {
    "sgd_bn": "resnet_bn",
    "sgd_fixup": "resnet_fixup",
    "ggn_fixup": "resnet_fixup",
    "ggn_spring_gn": "resnet_gn",
}


@pytest.fixture(autouse=True)
def composing(tmp_path: Path) -> Iterator[None]:
    """Compose from the checkout's conf/, with an outputs/ that is empty."""
    set_repository(tmp_path)
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def config_of(*overrides: str) -> DictConfig:
    return compose("train", overrides=list(overrides), return_hydra_config=True)


def resolved(*overrides: str) -> dict[str, Any]:
    return run_entries(plain(compose("train", overrides=list(overrides))))


def choices(config: DictConfig) -> dict[str, str | None]:
    return dict(config.hydra.runtime.choices)


def test_there_is_a_file_for_every_curve() -> None:
    figure_1 = {f"fig1/{data}_{curve}" for data in ("afad", "rsna") for curve in list(MODEL_OF)[:3]}
    assert set(EXPERIMENTS) == figure_1 | {
        "fig2/rsna_ggn_fixup",
        "ours/afad_ggn_spring_gn",
        "ours/rsna_ggn_spring_gn",
    }
    assert set(SWEEPS) >= {"lambda_alpha", "lambda_alpha_curves", "sgd_lr", "seeds", "tuned"}


@pytest.mark.parametrize("experiment", ALL_EXPERIMENTS)
def test_every_experiment_composes_and_is_recorded(experiment: str) -> None:
    assert choices(config_of(f"experiment={experiment}"))["experiment"] == experiment
    check_entries(resolved(f"experiment={experiment}", "init_from=null"))


@pytest.mark.parametrize(("scale", "data"), [("paper", "real"), ("laptop", "synthetic")])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_what_its_name_says(experiment: str, scale: str, data: str) -> None:
    dataset, curve = experiment.split("/")[1].split("_", 1)
    named = dataset if data == "real" else f"{dataset}_synthetic"
    swapped = [f"dataset={named}"] if data == "synthetic" else []
    words = [f"experiment={experiment}", f"trainer={scale}", *swapped]
    config = config_of(*words)
    chosen = choices(config)
    assert chosen["dataset"] == config.dataset.name == named
    assert chosen["model"] == MODEL_OF[curve]
    assert chosen["optimizer"] == curve.rsplit("_", 1)[0]
    assert chosen["experiment"] == experiment
    assert chosen["sweep"] is None
    start = OmegaConf.to_container(config, resolve=False)["init_from"]  # type: ignore[index, call-overload]
    if dataset == "afad":
        assert start is None
    else:
        source = {"sgd_bn": "fig1/afad_sgd_bn", "ggn_spring_gn": "ours/afad_ggn_spring_gn"}
        # Both Fixup curves start from the network that GGN trained.
        assert start == f"${{gramgn.trained:{source.get(curve, 'fig1/afad_ggn_fixup')}}}"
        assert config.warm_start.dataset == "afad"
    check_entries(resolved(*words, "init_from=null"))


def test_the_numbers_are_the_papers() -> None:
    """PAPER.md, the experiments' table: learning rates, lambda, alpha, momentum, batch size."""
    for dataset, lr, alpha in (("afad", 0.003, 0.3), ("rsna", 0.01, 0.1)):
        ggn = resolved(f"experiment=fig1/{dataset}_ggn_fixup", "init_from=null")
        assert (ggn["optimizer"]["lam"], ggn["optimizer"]["alpha"]) == (1.0, alpha)
        assert ggn["trainer"]["batch_size"] == 128
        assert ggn["trainer"]["image_size"] == 64
        assert ggn["model"]["depth"] == 32
        for network in ("bn", "fixup"):
            sgd = resolved(f"experiment=fig1/{dataset}_sgd_{network}", "init_from=null")
            assert (sgd["optimizer"]["lr"], sgd["optimizer"]["momentum"]) == (lr, 0.9)


def test_a_scale_wins_over_an_experiment_and_the_command_line_over_both() -> None:
    words = ("experiment=fig1/afad_ggn_fixup", "dataset=afad_synthetic")
    laptop = resolved(*words, "trainer=laptop")
    sizes = laptop["model"]["depth"], laptop["trainer"]["image_size"], laptop["trainer"]["epochs"]
    assert sizes == (14, 32, 10)
    assert (laptop["dataset"]["limit"], laptop["optimizer"]["alpha"]) == (2560, 0.3)
    debug = resolved(*words, "trainer=debug", "trainer.epochs=5", "model.depth=14")
    assert (debug["trainer"]["epochs"], debug["model"]["depth"]) == (5, 14)
    assert (debug["trainer"]["batch_size"], debug["trainer"]["scale"]) == (32, "debug")


@pytest.mark.parametrize(
    ("words", "alpha"),
    [
        (("dataset=afad",), 0.3),
        (("dataset=rsna",), 0.1),
        (("dataset=rsna_synthetic", "optimizer=ggn_lm"), 0.1),
        (("dataset=rsna", "optimizer=ggn_spring"), 0.8),
        (("dataset=rsna", "optimizer.alpha=7"), 7),
        (("experiment=theory/cyclic",), 0.0),
    ],
)
def test_alpha_follows_the_data_set(words: tuple[str, ...], alpha: float) -> None:
    assert resolved(*words)["optimizer"]["alpha"] == alpha


def test_the_paths_of_a_machine_are_not_recorded(tmp_path: Path) -> None:
    """`conf/local` sets `paths`: the record, and so the identity of a run, is that of the default paths."""
    raw = tmp_path.parent / "elsewhere"
    recorded, local = split_paths(resolved(f"paths.raw={raw}"))
    assert recorded == split_paths(resolved())[0]
    assert recorded["dataset"]["root"] == "data/raw/rsna_synthetic"
    assert local == {"dataset.root": str(raw / "rsna_synthetic")}


def test_the_command_line_wins_over_an_experiment() -> None:
    config = config_of(
        "experiment=fig1/rsna_ggn_fixup", "optimizer.alpha=7", "model=resnet_gn", "init_from=x"
    )
    assert (config.optimizer.alpha, config.init_from, choices(config)["model"]) == (7, "x", "resnet_gn")


def test_without_a_choice_there_is_none() -> None:
    chosen = choices(config_of())
    assert chosen["experiment"] is None
    assert chosen["sweep"] is None


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_composes_and_so_does_each_of_its_jobs(sweep: str) -> None:
    if sweep.startswith("optuna") and importlib.util.find_spec("optuna") is None:
        pytest.skip("needs the extra optuna: pip install -e .[optuna]")
    config = config_of(f"sweep={sweep}")
    assert config.hydra.mode.name == "MULTIRUN"
    assert choices(config)["sweep"] == sweep
    sweeper = config.hydra.sweeper
    points = [str(point).split() for point in sweeper.get("points") or [""]]
    axes = {str(key): str(values) for key, values in (sweeper.params or {}).items()}
    assert axes or points != [[]]
    # One point for each choice of options: the others differ in numbers.
    of_options = {tuple(word for word in point if "." not in word.split("=")[0]): point for point in points}
    for point in of_options.values():
        for key, values in axes.items():
            assert "(" in values or len(set(values.split(","))) == len(values.split(","))
            for value in [] if "(" in values else (values.split(",")[0], values.split(",")[-1]):
                check_entries(_job(sweep, *point, f"{key}={value}"))
        check_entries(_job(sweep, *point))


def _job(sweep: str, *overrides: str) -> dict[str, Any]:
    """Compose one job without the runs that it would start from."""
    fixed = [] if "alpha" in " ".join(overrides) else ["optimizer.alpha=1"] if "lambda" in sweep else []
    return resolved(f"sweep={sweep}", *overrides, *fixed, "init_from=null")


def test_the_grid_is_figure_2cs() -> None:
    """Lambda 0.25 to 4, alpha from 0.01 to 30 in half decades, epoch 10; up to 1e5 where a column has no cell."""
    config = config_of("sweep=lambda_alpha", "dataset=rsna_synthetic", "trainer=laptop")
    axes = {
        key: [float(value) for value in text.split(",")] for key, text in config.hydra.sweeper.params.items()
    }
    assert axes == {
        "optimizer.lam": [0.25, 0.5, 1, 2, 4],
        "optimizer.alpha": [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30],
    }
    assert config.trainer.epochs == 10
    assert config.optimizer.damping_convention == "mean"
    assert config.hydra.sweeper.extend.key == "optimizer.alpha"
    assert list(config.hydra.sweeper.extend["values"]) == [100, 300, 1000, 3000, 10000, 30000, 100000]
    # No cell of the grid is taken for a curve of figure 1.
    assert choices(config)["experiment"] == "fig2/rsna_ggn_fixup"


def test_a_grid_can_be_made_of_another_experiment() -> None:
    config = config_of("sweep=lambda_alpha", "experiment=ours/rsna_ggn_spring_gn")
    assert choices(config)["experiment"] == "ours/rsna_ggn_spring_gn"
    assert choices(config)["optimizer"] == "ggn_spring"


def test_no_baseline_is_tuned_with_fewer_trials_than_ours() -> None:
    counts: dict[tuple[str, ...], int] = {}
    points = [str(point).split() for point in config_of("sweep=tuned").hydra.sweeper.points]
    for optimizer, model, *_ in points:
        counts[optimizer, model] = counts.get((optimizer, model), 0) + 1
    assert min(counts.values()) == counts["optimizer=ggn_spring", "model=resnet_gn"] == 14
    assert {optimizer for optimizer, _ in counts} == {
        f"optimizer={name}" for name in ("sgd", "adamw", "muon", "ggn_spring")
    }
    assert len({tuple(point) for point in points}) == len(points)
