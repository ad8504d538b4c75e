"""The residual networks for small images of He et al. 2016, section 4.2, in three forms.

- `ResNetFixup`: no normalisation, Fixup initialisation (Zhang, Dauphin, Ma 2019, arXiv 1901.09321);
- `ResNetBN`: batch normalisation, as He et al. have it;
- `ResNetGN`: group normalisation (Wu, He 2018, arXiv 1803.08494).

Shapes: B images, C channels, H x W pixels, k outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

NUM_STAGES = 3

Norm = Callable[[int], nn.Module]


def positive_int(name: str, value: int) -> int:
    """Return `value` if it is a whole number of at least 1.

    Raises:
        ValueError: `value` is something else; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def he_normal(conv: nn.Conv2d, scale: float = 1.0) -> None:
    """Draw a convolution's weight from N(0, scale^2 * 2 / fan_out), fan_out = out_channels * kernel area."""
    fan_out = conv.weight.shape[0] * math.prod(conv.weight.shape[2:])
    nn.init.normal_(conv.weight, std=scale * math.sqrt(2 / fan_out))


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


class Shortcut(nn.Module):
    """The shortcut without parameters: every `stride`-th pixel, new channels filled with zeros."""

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


class FixupBlock(nn.Module):
    """Two convolutions, a scalar bias before each of them and after the first, one scalar multiplier.

    The second convolution starts at zero, so that a block starts as its shortcut.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, num_blocks: int) -> None:
        super().__init__()
        self.bias1a = nn.Parameter(torch.zeros(1))
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bias1b = nn.Parameter(torch.zeros(1))
        self.bias2a = nn.Parameter(torch.zeros(1))
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.scale = nn.Parameter(torch.ones(1))
        self.bias2b = nn.Parameter(torch.zeros(1))
        self.shortcut = Shortcut(in_channels, out_channels, stride)
        # L^(-1 / (2 m - 2)) for L blocks of m = 2 convolutions.
        he_normal(self.conv1, scale=num_blocks**-0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the next activations."""
        branch = torch.relu(self.conv1(x + self.bias1a) + self.bias1b)
        branch = self.conv2(branch + self.bias2a) * self.scale + self.bias2b
        return torch.relu(branch + self.shortcut(x))


class NormalisedBlock(nn.Module):
    """Two convolutions, each followed by a normalisation."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.norm1 = norm(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.norm2 = norm(out_channels)
        self.shortcut = Shortcut(in_channels, out_channels, stride)
        he_normal(self.conv1)
        he_normal(self.conv2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the next activations."""
        branch = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(branch)) + self.shortcut(x))


def check_images(x: Tensor, in_channels: int, network: str) -> None:
    """Raise ValueError unless `x` is images [B, in_channels, H, W]."""
    if x.ndim != 4 or x.shape[1] != in_channels:
        raise ValueError(
            f"{network} takes images [B, {in_channels}, H, W], got {list(x.shape)}; "
            "set in_channels to the number of channels of the images"
        )


class _ResNet(nn.Module):
    """The frame of the three networks: the input, the shapes of the blocks, the last layer."""

    batch_statistics: ClassVar[bool] = False
    """Whether, in training mode, an output depends on the other samples: Gram-Gauss-Newton rejects that."""

    def __init__(self, depth: int, width: int, in_channels: int, num_outputs: int) -> None:
        super().__init__()
        self.depth = depth
        self.num_blocks = NUM_STAGES * _blocks_per_stage(depth)
        self.width = positive_int("width", width)
        self.in_channels = positive_int("in_channels", in_channels)
        self.num_outputs = positive_int("num_outputs", num_outputs)

    def _block_shapes(self) -> list[tuple[int, int, int]]:
        """Return (in_channels, out_channels, stride) of every block; the stages have width, 2 width, 4 width."""
        shapes = []
        channels = self.width
        for stage in range(NUM_STAGES):
            for block in range(self.num_blocks // NUM_STAGES):
                stride = 2 if stage > 0 and block == 0 else 1
                shapes.append((channels, self.width * 2**stage, stride))
                channels = self.width * 2**stage
        return shapes

    def _add_last_layer(self, stem: nn.Conv2d, zero_last_layer: bool) -> None:
        self.last = last = nn.Linear(self.width * 2 ** (NUM_STAGES - 1), self.num_outputs)
        he_normal(stem)
        nn.init.zeros_(last.bias)
        if zero_last_layer:
            nn.init.zeros_(last.weight)
        else:
            nn.init.normal_(last.weight, std=1 / math.sqrt(last.in_features))

    def _features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to outputs [B], or [B, k] for k > 1."""
        check_images(x, self.in_channels, type(self).__name__)
        outputs: Tensor = self.last(self._features(x))
        return outputs[:, 0] if self.num_outputs == 1 else outputs


class ResNetFixup(_ResNet):
    """The paper's ResNetFixup: every output depends on its own image only, so Gram-Gauss-Newton applies.

    461,374 parameters at the defaults. Where the published CIFAR code leaves torch's own initialisation (the
    stem), He's normal with fan_out is used here as in the branches; the shortcut is the plain subsampled
    input, without the branch's first bias.

    Args:
        depth: 6 n + 2 layers; 32 in the paper.
        width: Number of channels of the first stage.
        in_channels: Number of channels of the images.
        num_outputs: k, the number of outputs per image.
        zero_last_layer: Start the last linear layer at zero, as published: then the first step sees only that
            layer, and rank(G) <= 4 width + 1. Otherwise its weight is drawn from N(0, 1 / fan_in).

    Raises:
        ValueError: `depth` is not 6 n + 2, or another argument is not a whole number of at least 1.
    """

    def __init__(
        self,
        depth: int = 32,
        *,
        width: int = 16,
        in_channels: int = 3,
        num_outputs: int = 1,
        zero_last_layer: bool = True,
    ) -> None:
        super().__init__(depth, width, in_channels, num_outputs)
        self.stem = _conv3x3(in_channels, width)
        self.bias1 = nn.Parameter(torch.zeros(1))
        self.blocks = nn.Sequential(*(FixupBlock(*shape, self.num_blocks) for shape in self._block_shapes()))
        self.bias2 = nn.Parameter(torch.zeros(1))
        self._add_last_layer(self.stem, zero_last_layer)

    def _features(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x) + self.bias1))
        return x.mean(dim=(2, 3)) + self.bias2


class _NormalisedResNet(_ResNet):
    """A ResNet whose convolutions are each followed by `norm`; the other arguments as in `ResNetFixup`."""

    def __init__(
        self, norm: Norm, depth: int, width: int, in_channels: int, num_outputs: int, zero_last_layer: bool
    ) -> None:
        super().__init__(depth, width, in_channels, num_outputs)
        self.stem = _conv3x3(in_channels, width)
        self.norm = norm(width)
        self.blocks = nn.Sequential(*(NormalisedBlock(*shape, norm) for shape in self._block_shapes()))
        self._add_last_layer(self.stem, zero_last_layer)

    def _features(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(torch.relu(self.norm(self.stem(x))))
        return features.mean(dim=(2, 3))


class ResNetBN(_NormalisedResNet):
    """The paper's ResNetBN, for first-order optimizers: in training an output depends on the whole batch.

    463,569 parameters at the defaults. Arguments not listed here are those of `ResNetFixup`.

    Args:
        bn_momentum: Weight of the newest batch in the running statistics, in (0, 1].

    Raises:
        ValueError: `depth` is not 6 n + 2, or another argument is out of range.
    """

    batch_statistics: ClassVar[bool] = True

    def __init__(
        self,
        depth: int = 32,
        *,
        width: int = 16,
        in_channels: int = 3,
        num_outputs: int = 1,
        zero_last_layer: bool = False,
        bn_momentum: float = 0.1,
    ) -> None:
        if (
            isinstance(bn_momentum, bool)
            or not isinstance(bn_momentum, int | float)
            or not 0 < bn_momentum <= 1
        ):
            raise ValueError(f"bn_momentum must be a number in (0, 1], got {bn_momentum!r}")

        def norm(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels, momentum=bn_momentum)

        super().__init__(norm, depth, width, in_channels, num_outputs, zero_last_layer)


class ResNetGN(_NormalisedResNet):
    """ResNetBN with group normalisation in place of batch normalisation.

    It acts inside each sample, so Gram-Gauss-Newton applies. 463,569 parameters at the defaults. Arguments not
    listed here are those of `ResNetFixup`.

    Args:
        num_groups: Number of groups of channels that are normalised together; a divisor of `width`.

    Raises:
        ValueError: `depth` is not 6 n + 2, `num_groups` does not divide `width`, or another argument is not a
            whole number of at least 1.
    """

    def __init__(
        self,
        depth: int = 32,
        *,
        width: int = 16,
        in_channels: int = 3,
        num_outputs: int = 1,
        zero_last_layer: bool = False,
        num_groups: int = 8,
    ) -> None:
        positive_int("num_groups", num_groups)
        if positive_int("width", width) % num_groups:
            divisors = [n for n in range(1, width + 1) if width % n == 0]
            raise ValueError(
                f"num_groups must divide width = {width}, got {num_groups}; valid are {divisors}"
            )

        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(num_groups, channels)

        super().__init__(norm, depth, width, in_channels, num_outputs, zero_last_layer)


def _blocks_per_stage(depth: int) -> int:
    """Return n of depth = 6 n + 2: three stages of n blocks with two convolutions, a stem and a linear layer.

    Raises:
        ValueError: `depth` is not such a number; the message names the nearest valid ones.
    """
    near = "8, 14, 20, 26, 32"
    if isinstance(depth, int) and not isinstance(depth, bool) and depth >= 8:
        if (depth - 2) % 6 == 0:
            return (depth - 2) // 6
        below = depth - (depth - 2) % 6
        near = f"{below} and {below + 6}"
    raise ValueError(f"depth must be 6 n + 2 with n >= 1, got {depth!r}; the nearest valid depths are {near}")
