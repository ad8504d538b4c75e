"""The problem to measure: a network, a batch and targets, named on the command line as `resnet:128x64`."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gramgn.damping import alpha_to_sum
from gramgn.errors import InputError
from gramgn.models import ResNetFixup, TorchvisionNetwork

LAM = 1.0
ALPHA = 0.3
"""The paper's alpha in the mean convention: alpha_sum = ALPHA b."""
PERTURBATION = 0.05
"""Standard deviation of the noise added to every parameter of the ResNet: at the published start most of J is zero."""

RESNET18 = "resnet18_gn"

_SHAPE = re.compile(r"(resnet18_gn|resnet|mlp)(?:(\d+)x)?(\d+)?:(\d+)(?:x(\d+))?")
_DEFAULT_SIZE = {RESNET18: 18, "resnet": 32, "mlp": 1024}
_DEFAULT_LAYERS = 4
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Shape:
    """A network and the size of its batch.

    Attributes:
        network: `"resnet"` (ResNetFixup), `"resnet18_gn"` (torchvision's ResNet-18 with group normalisation), both
            with three channels in, or `"mlp"`.
        size: Depth of the ResNet, width of the MLP.
        batch: b, the number of samples in the batch.
        pixels: Height and width of the images; None for the MLP.
        layers: Number of linear layers of the MLP.
    """

    network: str
    size: int
    batch: int
    pixels: int | None
    layers: int = _DEFAULT_LAYERS

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read a shape, with a depth of 32, a width of 1024 and 4 layers by default.

        Raises:
            InputError: `text` is no shape, or a number is out of range.
        """
        match = _SHAPE.fullmatch(text)
        network = match[1] if match else ""
        is_mlp = network == "mlp"
        if (
            match is None
            or (not is_mlp) != (match[5] is not None)
            or (match[2] and not (is_mlp and match[3]))
            or (network == RESNET18 and match[3])
        ):
            raise InputError(
                f"shape '{text}': write resnet[depth]:<batch>x<pixels>, such as resnet:128x64 or resnet8:16x32, "
                "resnet18_gn:<batch>x<pixels>, or mlp[[layers x]width]:<batch>, such as mlp:128 or mlp3x64:128"
            )
        size, layers = int(match[3] or _DEFAULT_SIZE[network]), int(match[2] or _DEFAULT_LAYERS)
        batch, pixels = int(match[4]), int(match[5]) if match[5] else None
        if not all(1 <= number <= _LARGEST for number in (size, layers, batch, pixels or 1)):
            raise InputError(f"shape '{text}': every number must be from 1 to {_LARGEST}")
        if network == "resnet" and (size < 8 or (size - 2) % 6):
            raise InputError(f"shape '{text}': the depth of a ResNet is 6 n + 2, such as 8, 14, 20 or 32")
        return cls(network, size, batch, pixels, layers)

    @property
    def text(self) -> str:
        """The shape as written on the command line, without defaults."""
        size = "" if self.size == _DEFAULT_SIZE[self.network] else str(self.size)
        if self.layers != _DEFAULT_LAYERS:
            size = f"{self.layers}x{self.size}"
        return f"{self.network}{size}:{self.batch}" + (f"x{self.pixels}" if self.pixels else "")

    @property
    def title(self) -> str:
        """The shape in words."""
        if self.network == "mlp":
            return f"{self.layers}-layer MLP of width {self.size:,}, batch {self.batch}"
        kind = "group norm" if self.network == RESNET18 else "Fixup"
        return f"ResNet-{self.size} {kind}, batch {self.batch}, {self.pixels}x{self.pixels}"


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
        if shape.pixels is None:
            width = shape.size
            hidden = [each for _ in range(shape.layers - 1) for each in (nn.Linear(width, width), nn.ReLU())]
            model = nn.Sequential(*hidden, nn.Linear(width, 1), nn.Flatten(start_dim=0))
            x = torch.randn(shape.batch, width)
        else:
            if shape.network == RESNET18:
                model = TorchvisionNetwork("resnet18")
            else:
                model = ResNetFixup(shape.size, zero_last_layer=False)
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(PERTURBATION * torch.randn_like(param))
            x = torch.randn(shape.batch, 3, shape.pixels, shape.pixels)
        y = torch.randn(shape.batch)
    return Problem(shape, model.to(device), x.to(device), y.to(device))
