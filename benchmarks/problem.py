"""The problem that is measured: a network, a batch and targets, named on the command line as `resnet:128x64`."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gramgn.damping import alpha_to_sum
from gramgn.errors import InputError
from gramgn.models import ResNetFixup

LAM = 1.0
ALPHA = 0.3
"""The paper's alpha in the mean convention: alpha_sum = ALPHA b."""
PERTURBATION = 0.05
"""Standard deviation of the noise added to every parameter of the ResNet: at the published start most of J is zero."""

_SHAPE = re.compile(r"(resnet|mlp)(\d+)?:(\d+)(?:x(\d+))?")
_DEFAULT_SIZE = {"resnet": 32, "mlp": 1024}
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Shape:
    """A network and the size of its batch.

    Attributes:
        network: `"resnet"` (ResNetFixup, three channels in) or `"mlp"` (four linear layers).
        size: Depth of the ResNet, width of the MLP.
        batch: b, the number of samples in the batch.
        pixels: Height and width of the images; None for the MLP.
    """

    network: str
    size: int
    batch: int
    pixels: int | None

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `resnet[depth]:<batch>x<pixels>` or `mlp[width]:<batch>`, by default of depth 32 and width 1024.

        Raises:
            InputError: `text` is neither, or a number is out of range.
        """
        match = _SHAPE.fullmatch(text)
        if match is None or (match[1] == "resnet") != (match[4] is not None):
            raise InputError(
                f"shape '{text}': write resnet[depth]:<batch>x<pixels>, such as resnet:128x64 or resnet8:16x32, "
                "or mlp[width]:<batch>, such as mlp:128"
            )
        size = int(match[2] or _DEFAULT_SIZE[match[1]])
        batch, pixels = int(match[3]), int(match[4]) if match[4] else None
        if not all(1 <= number <= _LARGEST for number in (size, batch, pixels or 1)):
            raise InputError(f"shape '{text}': every number must be from 1 to {_LARGEST}")
        if match[1] == "resnet" and (size < 8 or (size - 2) % 6):
            raise InputError(f"shape '{text}': the depth of a ResNet is 6 n + 2, such as 8, 14, 20 or 32")
        return cls(match[1], size, batch, pixels)

    @property
    def text(self) -> str:
        """The shape as written on the command line, without defaults."""
        size = "" if self.size == _DEFAULT_SIZE[self.network] else str(self.size)
        return f"{self.network}{size}:{self.batch}" + (f"x{self.pixels}" if self.pixels else "")

    @property
    def title(self) -> str:
        """The shape in words."""
        if self.pixels:
            return f"ResNet-{self.size} Fixup, batch {self.batch}, {self.pixels}x{self.pixels}"
        return f"4-layer MLP of width {self.size:,}, batch {self.batch}"


@dataclass(frozen=True)
class Problem:
    """A network with a batch; every path starts from a copy of it.

    Attributes:
        shape: The shape it has.
        model: Maps `x` to outputs [b].
        x: Inputs [b, 3, pixels, pixels] or [b, width], from N(0, 1).
        y: Targets [b], from N(0, 1).
    """

    shape: Shape
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def num_params(self) -> int:
        """The number m of trainable parameters."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def jacobian_bytes(self) -> int:
        """The size of J [b, m] in the dtype of the inputs."""
        return self.shape.batch * self.num_params * self.x.element_size()

    @property
    def alpha_sum(self) -> float:
        """The damping added to the sum J J^T."""
        return alpha_to_sum(ALPHA, "mean", num_samples=self.shape.batch)

    def copied(self, channels_last: bool = False) -> tuple[nn.Module, Tensor]:
        """Return a copy of the network and the inputs, in channels-last or contiguous memory format."""
        model, x = copy.deepcopy(self.model), self.x
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        return model, x

    def first(self, b: int) -> Problem:
        """Return the problem of the first `b` samples."""
        return Problem(replace(self.shape, batch=b), self.model, self.x[:b], self.y[:b])

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the same numbers in another dtype."""
        return Problem(self.shape, copy.deepcopy(self.model).to(dtype), self.x.to(dtype), self.y.to(dtype))


def make_problem(shape: Shape, device: torch.device, seed: int = 0) -> Problem:
    """Return the problem of `shape` in float32; the same numbers on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module
        if shape.pixels:
            model = ResNetFixup(shape.size, zero_last_layer=False)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(PERTURBATION * torch.randn_like(param))
            x = torch.randn(shape.batch, 3, shape.pixels, shape.pixels)
        else:
            hidden = [each for _ in range(3) for each in (nn.Linear(shape.size, shape.size), nn.ReLU())]
            model = nn.Sequential(*hidden, nn.Linear(shape.size, 1), nn.Flatten(start_dim=0))
            x = torch.randn(shape.batch, shape.size)
        y = torch.randn(shape.batch)
    return Problem(shape, model.to(device), x.to(device), y.to(device))
