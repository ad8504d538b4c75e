"""The MLP of the benchmark, and ResNetFixup in a form that packages with hooks on modules can see.

Such packages know parameters only as those of a module with a rule. Fixup's scalar biases and multipliers are
parameters of the block itself, so they are wrapped into modules here; nothing else changes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.models import ResNetFixup

NUM_LAYERS = 4
WRAPPED = ".value"
"""What wrapping a scalar adds to the name of its parameter."""


class MLP(nn.Module):
    """Four linear layers with ReLU between them; as many inputs as the layers are wide, one output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(NUM_LAYERS - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, width] to outputs [b]."""
        output: Tensor = self.layers(x)
        return output[:, 0]


class ScalarBias(nn.Module):
    """x + value, for one trained number."""

    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = nn.Parameter(value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Add the number to every entry."""
        return x + self.value


class ScalarScale(ScalarBias):
    """x * value, for one trained number."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply every entry by the number."""
        return x * self.value


class WrappedBlock(nn.Module):
    """A Fixup block with its scalars as modules."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.bias1a, self.bias1b = ScalarBias(block.bias1a), ScalarBias(block.bias1b)
        self.bias2a, self.bias2b = ScalarBias(block.bias2a), ScalarBias(block.bias2b)
        self.scale = ScalarScale(block.scale)
        self.conv1, self.conv2 = copy.deepcopy(block.conv1), copy.deepcopy(block.conv2)
        self.shortcut = copy.deepcopy(block.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, C, H, W] as the block does that was wrapped."""
        branch = torch.relu(self.bias1b(self.conv1(self.bias1a(x))))
        branch = self.bias2b(self.scale(self.conv2(self.bias2a(branch))))
        output: Tensor = torch.relu(branch + self.shortcut(x))
        return output


class WrappedFixup(nn.Module):
    """A ``ResNetFixup`` with one output and its scalars as modules."""

    def __init__(self, network: ResNetFixup) -> None:
        super().__init__()
        self.stem = copy.deepcopy(network.stem)
        self.bias1 = ScalarBias(network.bias1)
        self.blocks = nn.Sequential(*(WrappedBlock(block) for block in network.blocks))
        self.bias2 = ScalarBias(network.bias2)
        self.last = copy.deepcopy(network.last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [b, C, H, W] to outputs [b]."""
        x = self.blocks(torch.relu(self.bias1(self.stem(x))))
        output: Tensor = self.last(self.bias2(x.mean(dim=(2, 3))))
        return output[:, 0]


def wrapped(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` in which every parameter belongs to a module with nothing else to do."""
    return WrappedFixup(model) if isinstance(model, ResNetFixup) else copy.deepcopy(model)


def plain_name(name: str) -> str:
    """Return the name that a parameter of a wrapped network had before it was wrapped."""
    return name.removeprefix("_module.").removesuffix(WRAPPED)
