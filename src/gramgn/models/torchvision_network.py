"""torchvision's classification networks as regression networks."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, nn

from gramgn.models.resnet import check_images, he_normal, positive_int


class TorchvisionNetwork(nn.Module):
    """A classification network of torchvision, untrained, with `num_outputs` outputs instead of its classes.

    Args:
        network: The name in `torchvision.models`, such as `"resnet18"` (the default) or `"mobilenet_v3_small"`.
        norm: What normalises where torchvision has batch normalisation. `"group"`: group normalisation, which acts
            inside each sample, so that Gram-Gauss-Newton applies. `"batch"`: batch normalisation as it is.
        num_groups: Number of groups for `"group"`, 32 by default; for a layer whose number of channels it does not
            divide, their greatest common divisor.
        in_channels: Number of channels of the images, 3 by default; for another number the first convolution is
            replaced.
        num_outputs: Number of outputs per image, 1 by default.
        small_images: For ResNets: a 3x3 convolution of stride 1 as the stem and no max-pooling, as is usual for
            images of about 32x32.

    Attributes:
        batch_statistics: Whether, in training mode, an output depends on the other images of the batch.

    Raises:
        ImportError: torchvision is not installed.
        ValueError: torchvision has no classification network of that name, `small_images` does not apply to it, or
            another argument is out of range.
    """

    def __init__(
        self,
        network: str = "resnet18",
        *,
        norm: Literal["group", "batch"] = "group",
        num_groups: int = 32,
        in_channels: int = 3,
        num_outputs: int = 1,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if norm not in ("group", "batch"):
            raise ValueError(f"norm must be group or batch, got {norm!r}")
        self.in_channels = positive_int("in_channels", in_channels)
        self.num_outputs = positive_int("num_outputs", num_outputs)
        self.network = _build(network, num_outputs)
        if small_images:
            _use_small_stem(self.network, network, in_channels)
        elif in_channels != 3:
            _replace_first_convolution(self.network, in_channels)
        if norm == "group":
            _use_group_norm(self.network, positive_int("num_groups", num_groups))
        self.batch_statistics = any(isinstance(module, nn.BatchNorm2d) for module in self.modules())

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to outputs [B], or [B, k] for k > 1."""
        check_images(x, self.in_channels, type(self).__name__)
        outputs: Tensor = self.network(x)
        return outputs[:, 0] if self.num_outputs == 1 else outputs


def _build(name: str, num_outputs: int) -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(
            f"the networks of torchvision need the package torchvision ({error}): python -m pip install torchvision "
            "installs it, or choose another network, such as model=resnet_gn"
        ) from error
    names = models.list_models(module=models)
    if name not in names:
        raise ValueError(f"torchvision has no network {name!r}; there are: {', '.join(names)}")
    return models.get_model(name, weights=None, num_classes=num_outputs)


def _use_small_stem(network: Any, name: str, in_channels: int) -> None:
    if not (isinstance(getattr(network, "conv1", None), nn.Conv2d) and hasattr(network, "maxpool")):
        raise ValueError(f"small_images=true is for the ResNets of torchvision; set it to false for {name}")
    network.conv1 = nn.Conv2d(in_channels, network.conv1.out_channels, kernel_size=3, padding=1, bias=False)
    he_normal(network.conv1)
    network.maxpool = nn.Identity()


def _replace_first_convolution(network: nn.Module, in_channels: int) -> None:
    name, first = next((n, m) for n, m in network.named_modules() if isinstance(m, nn.Conv2d))
    padding: Any = first.padding
    replacement = nn.Conv2d(
        in_channels,
        first.out_channels,
        kernel_size=first.kernel_size,  # type: ignore[arg-type]
        stride=first.stride,  # type: ignore[arg-type]
        padding=padding,
        bias=first.bias is not None,
    )
    he_normal(replacement)
    network.set_submodule(name, replacement)


def _use_group_norm(network: nn.Module, num_groups: int) -> None:
    layers = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)]
    for name, layer in layers:
        channels = layer.num_features
        network.set_submodule(name, nn.GroupNorm(math.gcd(num_groups, channels), channels, eps=layer.eps))
