"""What the residual networks for small images have in common (He et al. 2016, section 4.2).

Shapes: B images, C channels, H x W pixels, k outputs.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

NUM_STAGES = 3


def blocks_per_stage(depth: int) -> int:
    """Return n of depth = 6 n + 2: three stages of n blocks with two convolutions, a stem and a linear layer.

    Raises:
        ValueError: ``depth`` is no such number; the message names the nearest that are.
    """
    whole = isinstance(depth, int) and not isinstance(depth, bool)
    if whole and depth >= 8 and (depth - 2) % 6 == 0:
        return (depth - 2) // 6
    if not whole or depth < 8:
        near = "8, 14, 20, 26, 32"
    else:
        below = depth - (depth - 2) % 6
        near = f"{below} and {below + 6}"
    raise ValueError(f"depth must be 6 n + 2 with n >= 1, got {depth!r}; the nearest valid depths are {near}")


def positive_int(name: str, value: int) -> int:
    """Return ``value`` if it is a whole number of at least 1.

    Raises:
        ValueError: It is not; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution without bias that keeps the plane's size at stride 1."""
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


def he_normal(conv: nn.Conv2d, scale: float = 1.0) -> None:
    """Draw a convolution's weight from N(0, scale^2 * 2 / fan_out), fan_out = out_channels * kernel area."""
    fan_out = conv.weight.shape[0] * math.prod(conv.weight.shape[2:])
    nn.init.normal_(conv.weight, std=scale * math.sqrt(2 / fan_out))


def initialise_last(linear: nn.Linear, zero: bool) -> None:
    """Set the bias of the last layer to zero, and its weight to zero or to N(0, 1 / fan_in)."""
    nn.init.zeros_(linear.bias)
    if zero:
        nn.init.zeros_(linear.weight)
    else:
        nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))


class Shortcut(nn.Module):
    """The parameter-free shortcut: every ``stride``-th pixel, new channels filled with zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.num_new = out_channels - in_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C + num_new, ceil(H / stride), ceil(W / stride)]."""
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.num_new > 0:
            x = torch.cat((x, x.new_zeros(x.shape[0], self.num_new, *x.shape[2:])), dim=1)
        return x

    def extra_repr(self) -> str:
        """Describe the shortcut in the network's repr."""
        return f"num_new={self.num_new}, stride={self.stride}"


class ResNet(nn.Module):
    """The frame of the three networks: what goes in, the shape of the stages, what comes out.

    Args:
        depth: Number of layers with weights, 6 n + 2.
        width: Channels of the stem and the first stage; the stages have width, 2 width and 4 width.
        in_channels: Channels of the images.
        num_outputs: k, the outputs per image.
    """

    batch_statistics: ClassVar[bool] = False
    """Whether, in training mode, an output depends on the other samples: Gram-Gauss-Newton refuses that."""

    def __init__(self, depth: int, *, width: int, in_channels: int, num_outputs: int) -> None:
        super().__init__()
        self.depth = depth
        self.num_blocks = NUM_STAGES * blocks_per_stage(depth)
        self.width = positive_int("width", width)
        self.in_channels = positive_int("in_channels", in_channels)
        self.num_outputs = positive_int("num_outputs", num_outputs)
        self.num_features = width * 2 ** (NUM_STAGES - 1)

    def block_shapes(self) -> list[tuple[int, int, int]]:
        """Return (in_channels, out_channels, stride) of every block, first to last."""
        shapes = []
        channels = self.width
        for stage in range(NUM_STAGES):
            for block in range(self.num_blocks // NUM_STAGES):
                stride = 2 if stage > 0 and block == 0 else 1
                shapes.append((channels, self.width * 2**stage, stride))
                channels = self.width * 2**stage
        return shapes

    def check_images(self, x: Tensor) -> None:
        """Raise a ValueError unless ``x`` is [B, in_channels, H, W]."""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__} takes images [B, {self.in_channels}, H, W], got {list(x.shape)}; "
                "set in_channels to the number of channels of the images"
            )

    def shape_output(self, outputs: Tensor) -> Tensor:
        """Return [B, k] as it is for k > 1 and as [B] for one output."""
        return outputs[:, 0] if self.num_outputs == 1 else outputs
