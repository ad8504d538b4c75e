"""ResNet with batch normalisation (He et al. 2016) and with group normalisation (Wu, He 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from gramgn.models._resnet import ResNet, Shortcut, conv3x3, he_normal, initialise_last, positive_int


class NormalisedBlock(nn.Module):
    """Two convolutions, each followed by a normalisation."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.norm1 = norm(out_channels)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.norm2 = norm(out_channels)
        self.shortcut = Shortcut(in_channels, out_channels, stride)
        he_normal(self.conv1)
        he_normal(self.conv2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the next activations."""
        branch = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(branch)) + self.shortcut(x))


class _NormalisedResNet(ResNet):
    """A ResNet whose convolutions are each followed by ``norm``."""

    def __init__(
        self,
        depth: int,
        *,
        width: int,
        in_channels: int,
        num_outputs: int,
        zero_last_layer: bool,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__(depth, width=width, in_channels=in_channels, num_outputs=num_outputs)
        self.stem = conv3x3(in_channels, width)
        self.norm = norm(width)
        self.blocks = nn.Sequential(*(NormalisedBlock(*shape, norm) for shape in self.block_shapes()))
        self.last = nn.Linear(self.num_features, num_outputs)
        he_normal(self.stem)
        initialise_last(self.last, zero_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to outputs [B], or [B, k] for k > 1."""
        self.check_images(x)
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return self.shape_output(self.last(x.mean(dim=(2, 3))))


class ResNetBN(_NormalisedResNet):
    """The paper's ResNetBN, for first-order optimizers: in training an output depends on the whole batch.

    463,569 parameters at the defaults.

    Args:
        depth: 6 n + 2 layers; 32 in the paper.
        width: Channels of the first stage.
        in_channels: Channels of the images.
        num_outputs: k, the outputs per image.
        zero_last_layer: Start the last linear layer at zero instead of N(0, 1 / fan_in).
        bn_momentum: Weight of the newest batch in the running statistics, in (0, 1].

    Raises:
        ValueError: ``depth`` is not 6 n + 2, or another argument is out of range.
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
            or not isinstance(bn_momentum, (int, float))
            or not 0 < bn_momentum <= 1
        ):
            raise ValueError(f"bn_momentum must be a number in (0, 1], got {bn_momentum!r}")
        super().__init__(
            depth,
            width=width,
            in_channels=in_channels,
            num_outputs=num_outputs,
            zero_last_layer=zero_last_layer,
            norm=lambda channels: nn.BatchNorm2d(channels, momentum=bn_momentum),
        )


class ResNetGN(_NormalisedResNet):
    """ResNetBN with group normalisation (arXiv 1803.08494) in place of batch normalisation.

    It acts inside each sample, so Gram-Gauss-Newton applies. 463,569 parameters at the defaults.

    Args:
        depth: 6 n + 2 layers.
        width: Channels of the first stage, a multiple of ``num_groups``.
        in_channels: Channels of the images.
        num_outputs: k, the outputs per image.
        zero_last_layer: Start the last linear layer at zero instead of N(0, 1 / fan_in).
        num_groups: Groups of channels that are normalised together.

    Raises:
        ValueError: ``depth`` is not 6 n + 2, ``num_groups`` does not divide ``width``, or another argument is
            no whole number of at least 1.
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
        super().__init__(
            depth,
            width=width,
            in_channels=in_channels,
            num_outputs=num_outputs,
            zero_last_layer=zero_last_layer,
            norm=lambda channels: nn.GroupNorm(num_groups, channels),
        )
