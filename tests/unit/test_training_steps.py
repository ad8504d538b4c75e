"""User-defined optimizers that are built from the network, as the training loop takes their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn.errors import ConfigError
from gramgn.optim import StepInfo
from gramgn.training import Stepper


class Descent(torch.optim.Optimizer):
    """Gradient descent that returns whatever it is told to make of the residuals."""

    takes_model = True

    def __init__(self, model: nn.Module, returned: Callable[[Tensor], Any]) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.returned = returned

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        residual = closure()
        self.zero_grad()
        residual.square().mean().backward()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param -= 0.1 * param.grad
        return self.returned(residual)


def stepper(returned: Callable[[Tensor], Any]) -> Stepper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    return Stepper(model, Descent(model, returned))


def test_the_least_that_a_step_returns() -> None:
    """Loss and number of samples are enough; what was not measured is not recorded."""
    take = stepper(lambda r: StepInfo(loss=float(r.detach().square().mean()), num_samples=len(r)))
    inputs, targets = torch.randn(4, 3), torch.randn(4)
    with torch.no_grad():
        expected = take.model(inputs) - targets
    report = take(inputs, targets)
    assert report.finite
    assert report.loss == pytest.approx(float(expected.square().mean()))
    assert report.absolute_error == pytest.approx(float(expected.abs().mean()))
    assert report.means() == {}
    assert repr(report.info).count("tensor") == 0
    assert float(take(inputs, targets).loss) < report.loss


@pytest.mark.parametrize("returned", [lambda r: None, lambda r: r.detach().square().mean()])
def test_a_step_that_returns_something_else(returned: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ConfigError, match=r"Descent .* must return a gramgn\.optim\.StepInfo"):
        stepper(returned)(torch.randn(4, 3), torch.randn(4))
