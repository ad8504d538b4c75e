"""The two-layer network: its scaling, what is trained, and what it rejects."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

from gramgn.models import TwoLayer


def test_output_by_hand() -> None:
    """The formula f = (1 / sqrt M) a^T sigma(W x)."""
    model = TwoLayer(3, width=5, activation="tanh")
    x = torch.randn(4, 3)
    W, a = model.hidden.weight.detach(), model.signs
    expected = [float(sum(a[m] * torch.tanh(W[m] @ row) for m in range(5)) / math.sqrt(5)) for row in x]
    with torch.no_grad():
        assert model(x).shape == (4,)
        assert model(x).tolist() == pytest.approx(expected, abs=1e-6)


def test_initial_draws() -> None:
    """W from N(0, I), a uniform on {-1, +1}: moments of 200,000 and 10,000 draws within five standard errors."""
    torch.manual_seed(0)
    model = TwoLayer(20, width=10_000)
    W = model.hidden.weight.detach()
    assert abs(float(W.mean())) < 5 / math.sqrt(W.numel())
    assert abs(float(W.square().mean()) - 1) < 5 * math.sqrt(2 / W.numel())
    assert set(model.signs.tolist()) == {-1.0, 1.0}
    assert abs(float(model.signs.mean())) < 5 / math.sqrt(10_000)


def test_only_w_is_trained_and_the_signs_are_saved() -> None:
    model = TwoLayer(3, width=5)
    assert [name for name, _ in model.named_parameters()] == ["hidden.weight"]
    assert sum(param.numel() for param in model.parameters()) == 15
    other = TwoLayer(3, width=5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.signs, model.signs)
    assert model.double().signs.dtype == torch.float64


def test_copies_and_pickles() -> None:
    model, x = TwoLayer(3, width=5, activation="gelu"), torch.randn(2, 3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_outputs_stay_of_order_one() -> None:
    """|f| = O(1) at initialisation whatever M is."""
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(50, 20), dim=1)
    for M in (64, 4096):
        assert 0.3 < float(TwoLayer(20, width=M)(x).detach().std()) < 1.5


def test_relu_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="activation=relu has no continuous derivative"):
        TwoLayer(3, width=4, activation="relu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 3, "activation": "sigmoid"}, "erf, tanh, softplus, gelu, relu, got 'sigmoid'"),
        ({"in_features": 3, "activation": ["erf"]}, "activation must be one of"),
        ({"in_features": 3, "width": 0}, "width must be a whole number of at least 1, got 0"),
        ({"in_features": 2.5}, "in_features must be a whole number"),
        ({}, "no fixed number of features"),
    ],
)
def test_what_is_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoLayer(**arguments)


@pytest.mark.parametrize("shape", [(2, 4), (3,), (2, 3, 8, 8)])
def test_inputs_of_another_shape_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes vectors \[b, 3\].*in_features"):
        TwoLayer(3, width=4)(torch.zeros(shape))
