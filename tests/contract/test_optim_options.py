"""What the optimizer's options and parameter groups may hold, and what is said of the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from gramgn import GramGaussNewton
from gramgn.optim import Armijo, LevenbergMarquardt, Loop, Stream, Vmap

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(0, 1, 8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def built(model: nn.Module, **options: Any) -> GramGaussNewton:
    return GramGaussNewton(model, **{"lam": 1.0, "alpha": 0.3, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 0.0}, "lam must be a finite number > 0, got 0.0"),
        ({"lam": -1}, "lam must be a finite number > 0"),
        ({"lam": float("inf")}, "lam must be a finite number"),
        ({"alpha": -0.1}, "alpha must be a finite number >= 0, got -0.1"),
        ({"alpha": float("nan")}, "alpha must be a finite number"),
        ({"alpha": "0.3"}, "alpha must be a number >= 0, got '0.3' of type str"),
        ({"alpha": True}, "alpha must be a number >= 0, got True of type bool"),
        ({"alpha": None}, "alpha must be a number >= 0"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
        (
            {"damping_convention": "average"},
            "damping_convention must be one of 'sum', 'mean', 'trace', got 'average'",
        ),
        ({"engine": "magic"}, "engine must be one of 'stream', 'vmap', 'loop', 'rows', got 'magic'"),
        (
            {"engine": {"chunk_size": 0}},
            "chunk_size must be None, 'auto' or a whole number of at least 1, got 0",
        ),
        ({"engine": {"chunk_size": 2.0}}, "chunk_size must be None, 'auto' or a whole number"),
        ({"engine": {"name": "vmap", "chunk_size": "auto"}}, "chunk_size must be None or a whole number"),
        (
            {"engine": {"name": "loop", "chunk_size": 2}},
            "chunk_size is an option of engine 'stream' and 'vmap'",
        ),
        (
            {"engine": {"name": "vmap", "memory_budget": "least"}},
            "memory_budget is an option of engine 'stream'; engine",
        ),
        ({"engine": {"chunk_sise": 2}}, "engine has no 'chunk_sise': did you mean 'chunk_size'?"),
        *(
            (
                {"engine": {"memory_budget": wrong}},
                "memory_budget must be None, 'auto', 'least' or, in bytes, a whole number of at least 1, got",
            )
            for wrong in (0, -1, 2.5, "256 things", True)
        ),
        ({"engine": {"conv_path": "fast"}}, "conv_path must be one of 'static', 'probe', "),
        (
            {"engine": {"jacobian_dtype": "float16"}},
            "jacobian_dtype must be None or 'bfloat16', got 'float16'",
        ),
        ({"loss": "mse"}, "loss must be one of 'squared_error', 'cross_entropy', got 'mse'"),
        ({"momentum": 1.0}, "momentum must be a finite number >= 0 and < 1, got 1.0"),
        ({"momentum": -0.1}, "momentum must be a finite number >= 0 and < 1"),
        ({"momentum": None}, "momentum must be a number >= 0 and < 1, got None of type NoneType"),
        ({"weight_decay": -1e-4}, "weight_decay must be a finite number >= 0"),
        ({"decoupled_weight_decay": 1}, "decoupled_weight_decay must be True or False, got 1"),
        ({"damping_warmup_steps": 2.0}, "damping_warmup_steps must be a whole number of at least 0, got 2.0"),
        ({"damping_warmup_steps": -1}, "damping_warmup_steps must be a whole number of at least 0"),
        ({"damping_warmup_factor": 0.5}, "damping_warmup_factor must be a finite number >= 1, got 0.5"),
        ({"max_step_norm": 0.0}, "max_step_norm must be a finite number > 0"),
        (
            {"line_search": "wolfe"},
            "line_search must be None, 'armijo', 'grid', a gramgn.optim.Armijo or a mapping",
        ),
        ({"line_search": Armijo(), "adaptive_damping": LevenbergMarquardt()}, "choose one of them"),
        ({"line_search": {"shrinks": 0.5}}, "line_search has no 'shrinks': did you mean 'shrink'?"),
        ({"line_search": {"c": 1.0}}, "line_search.c must be a finite number > 0 and < 1, got 1.0"),
        ({"line_search": {"max_tries": 0}}, "line_search.max_tries must be a whole number of at least 1"),
        ({"adaptive_damping": True}, "adaptive_damping must be None, a gramgn.optim.LevenbergMarquardt or a"),
        ({"adaptive_damping": {"facotr": 2.0}}, "adaptive_damping has no 'facotr': did you mean 'factor'?"),
        ({"adaptive_damping": {"factor": 1.0}}, "adaptive_damping.factor must be a finite number > 1"),
        ({"adaptive_damping": {"low": 0.9}}, "adaptive_damping.low must be at most high, got 0.9 and 0.75"),
        ({"adaptive_damping": {"min_alpha": 0.0}}, "adaptive_damping.min_alpha must be a finite number > 0"),
        ({"adaptive_damping": {"max_alpha": 1e-9}}, "adaptive_damping.min_alpha must be at most max_alpha"),
        ({"adaptive_damping": {}, "lam": 0.49}, "adaptive damping needs lam >= 0.5, got 0.49"),
        ({"adaptive_damping": {}, "alpha": 0.0}, "needs alpha > 0 in every parameter group"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    """G03: lam <= 0 and negative alpha, and whatever else is no valid value, are a ValueError at start."""
    with pytest.raises(ValueError, match=re.escape(message)):
        built(network(), **options)


def test_lam_and_alpha_have_no_default() -> None:
    with pytest.raises(TypeError, match="lam"):
        GramGaussNewton(network())  # type: ignore[call-arg]


def grouped(model: nn.Sequential, **options: Any) -> list[dict[str, Any]]:
    """Return two groups, one for each linear layer; the options are the second's."""
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), **options}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lam", 2.0),
        ("momentum", 0.5),
        ("damping_convention", "sum"),
        ("decoupled_weight_decay", True),
        ("damping_warmup_steps", 3),
        ("damping_warmup_factor", 2.0),
        ("max_step_norm", 1.0),
    ],
)
def test_values_that_all_groups_share(key: str, value: Any) -> None:
    """G14: refused at construction, by add_param_group, and at the step where a scheduler wrote one."""
    message = rf"{key} must be the same in all parameter groups.*group 0 has .*, group 1 has {value!r}"
    model = network()
    with pytest.raises(ValueError, match=message):
        GramGaussNewton(model, grouped(model, **{key: value}), lam=1.0, alpha=0.3)
    optimizer = GramGaussNewton(model, model[0].parameters(), lam=1.0, alpha=0.3)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(grouped(model, **{key: value})[1])
    assert len(optimizer.param_groups) == 1
    optimizer = GramGaussNewton(model, grouped(model), lam=1.0, alpha=0.3)
    optimizer.param_groups[1][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: model(X)[:, 0] - Y)


def test_groups_of_different_damping_need_some_in_each() -> None:
    """G14: also where a scheduler takes the last damping of one away; nothing moves."""
    model = network()
    for options in ({"alpha": 0.0}, {"alpha": 0.0, "weight_decay": 0.1}):
        with pytest.raises(ValueError, match=r"different damping need alpha > 0 in each, got group 0: 0\.3"):
            GramGaussNewton(model, grouped(model, **options), lam=1.0, alpha=0.3)
    optimizer = GramGaussNewton(model, grouped(model), lam=1.0, alpha=0.3)
    optimizer.param_groups[1]["alpha"] = 0.0
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="group 1: 0"):
        optimizer.step(lambda: model(X)[:, 0] - Y)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    # All of them 0, and decay that is decoupled, are no different damping.
    optimizer.param_groups[0]["alpha"] = 0.0
    GramGaussNewton(model, grouped(model, weight_decay=0.1), lam=1.0, alpha=0.0, decoupled_weight_decay=True)


def test_unknown_keys_of_a_group() -> None:
    model = network()
    with pytest.raises(
        ValueError, match=r"no 'weight_deacy': did you mean 'weight_decay'\? Valid keys: alpha"
    ):
        GramGaussNewton(model, grouped(model, weight_deacy=0.1), lam=1.0, alpha=0.3)
    with pytest.raises(ValueError, match=r"alpha must be a finite number >= 0, got -1\.0"):
        GramGaussNewton(model, grouped(model, alpha=-1.0), lam=1.0, alpha=0.3)
    GramGaussNewton(model, grouped(model, initial_lr=1.0, name="head"), lam=1.0, alpha=0.3)


def test_adaptive_damping_is_checked_at_the_step() -> None:
    model = network()
    optimizer = built(model, adaptive_damping={})
    optimizer.param_groups[0]["lam"] = 0.25
    with pytest.raises(ValueError, match=r"adaptive damping needs lam >= 0\.5, got 0\.25"):
        optimizer.step(lambda: model(X)[:, 0] - Y)


def test_options_may_be_mappings_or_objects() -> None:
    """A configuration gives a mapping, or an object by its name; both are the same."""
    for option, value in (
        ("adaptive_damping", LevenbergMarquardt(factor=3.0)),
        ("line_search", Armijo(shrink=0.25)),
        ("line_search", Armijo()),
    ):
        mapping = {name: getattr(value, name) for name in value.__dataclass_fields__}
        texts = {repr(built(network(), **{option: given})) for given in (value, mapping)}
        assert len(texts) == 1
        assert repr(value) in texts.pop()
    assert repr(built(network(), line_search="armijo")) == repr(built(network(), line_search=Armijo()))


def test_engines_are_names_options_or_mappings() -> None:
    """A configuration names an engine in a mapping that lists all options; those it lacks stand at their defaults."""
    listed = {
        "name": "stream",
        "chunk_size": None,
        "conv_path": "static",
        "memory_budget": None,
        "jacobian_dtype": None,
        "kernels": "auto",
    }
    for options, name, own in (
        (Stream(chunk_size=2), "stream", {"chunk_size": 2}),
        (Vmap(chunk_size=2), "vmap", {"chunk_size": 2}),
        (Loop(), "loop", {}),
    ):
        given = [options, {**listed, "name": name, **own}, *([name] if not own else [])]
        (text,) = {repr(built(network(), engine=engine)) for engine in given}
        assert f"engine: {options!r}" in text
