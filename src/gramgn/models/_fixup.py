"""ResNet without normalisation, by Fixup initialisation (Zhang, Dauphin, Ma 2019, arXiv 1901.09321)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gramgn.models._resnet import ResNet, Shortcut, conv3x3, he_normal, initialise_last


class FixupBlock(nn.Module):
    """Two convolutions with scalar biases before each and after the first, one scalar multiplier.

    The second convolution starts at zero, so that a block starts as its shortcut.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, num_blocks: int) -> None:
        super().__init__()
        self.bias1a = nn.Parameter(torch.zeros(1))
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bias1b = nn.Parameter(torch.zeros(1))
        self.bias2a = nn.Parameter(torch.zeros(1))
        self.conv2 = conv3x3(out_channels, out_channels)
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


class ResNetFixup(ResNet):
    """The paper's ResNetFixup: every output depends on its own image only, so Gram-Gauss-Newton applies.

    461,374 parameters at the defaults. Where the published CIFAR code leaves torch's own initialisation (the
    stem), He's normal with fan_out is used here as in the branches; the shortcut is the plain subsampled
    input, without the branch's first bias.

    Args:
        depth: 6 n + 2 layers; 32 in the paper.
        width: Channels of the first stage.
        in_channels: Channels of the images.
        num_outputs: k, the outputs per image.
        zero_last_layer: Start the last linear layer at zero (published). Then the first step only sees that
            layer, and rank(G) <= 4 width + 1. Otherwise its weight is drawn from N(0, 1 / fan_in).

    Raises:
        ValueError: ``depth`` is not 6 n + 2, or another argument is no whole number of at least 1.
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
        super().__init__(depth, width=width, in_channels=in_channels, num_outputs=num_outputs)
        self.stem = conv3x3(in_channels, width)
        self.bias1 = nn.Parameter(torch.zeros(1))
        self.blocks = nn.Sequential(*(FixupBlock(*shape, self.num_blocks) for shape in self.block_shapes()))
        self.bias2 = nn.Parameter(torch.zeros(1))
        self.last = nn.Linear(self.num_features, num_outputs)
        he_normal(self.stem)
        initialise_last(self.last, zero_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to outputs [B], or [B, k] for k > 1."""
        self.check_images(x)
        x = self.blocks(torch.relu(self.stem(x) + self.bias1))
        return self.shape_output(self.last(x.mean(dim=(2, 3)) + self.bias2))
