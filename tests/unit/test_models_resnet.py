"""Shapes, sizes and starting points of the residual networks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import models
from gramgn.models import ResNetBN, ResNetFixup, ResNetGN

NETWORKS = [ResNetFixup, ResNetBN, ResNetGN]
every_network = pytest.mark.parametrize("network", NETWORKS)


def num_parameters(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("network", "options", "expected"),
    [
        (ResNetFixup, {}, 461_374),
        (ResNetBN, {}, 463_569),
        (ResNetGN, {}, 463_569),
        # The published shapes for CIFAR-10 (10 outputs) have 0.46 million (depth 32) and 0.27 million (depth
        # 20).
        (ResNetBN, {"num_outputs": 10}, 464_154),
        (ResNetBN, {"depth": 20, "num_outputs": 10}, 269_722),
        (ResNetFixup, {"in_channels": 1}, 461_374 - 2 * 9 * 16),
    ],
)
def test_parameter_counts(network: type[nn.Module], options: dict[str, Any], expected: int) -> None:
    assert num_parameters(network(**options)) == expected


@every_network
@pytest.mark.parametrize("depth", [8, 14, 32])
def test_depth_counts_the_layers_with_weights(network: type[nn.Module], depth: int) -> None:
    """Convolutions and the linear layer: 6 n + 2 of them."""
    layers = [m for m in network(depth).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == depth


@every_network
@pytest.mark.parametrize(("size", "channels"), [(8, 3), (16, 1), (9, 2)])
def test_outputs_are_one_number_or_k_for_each_image(
    network: type[nn.Module], size: int, channels: int
) -> None:
    x = torch.randn(4, channels, size, size)
    assert network(8, width=8, in_channels=channels)(x).shape == (4,)
    assert network(8, width=8, in_channels=channels, num_outputs=3)(x).shape == (4, 3)


@every_network
def test_stages_halve_the_plane_and_double_the_channels(network: type[nn.Module]) -> None:
    model = network(14, width=8, in_channels=1)
    shapes: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: shapes.append(tuple(output.shape[1:])))
    model(torch.randn(2, 1, 16, 16))
    assert shapes == [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2 + [(32, 4, 4)] * 2


def test_the_shortcut_takes_every_second_pixel_and_adds_zero_channels() -> None:
    x = torch.randn(2, 3, 5, 5)
    same, halving = [block.shortcut for block in ResNetFixup(8, width=3).blocks[:2]]
    out = halving(x)
    assert torch.equal(out[:, :3], x[:, :, ::2, ::2])
    assert not bool(out[:, 3:].any())
    assert torch.equal(same(x), x)
    assert not list(halving.parameters())


def test_a_fixup_block_starts_as_its_shortcut() -> None:
    x = torch.rand(2, 4, 6, 6)
    assert torch.equal(ResNetFixup(8, width=4).blocks[0](x), x)


def test_fixup_block_by_hand() -> None:
    """Where each scalar acts: relu((conv2(relu(conv1(x + b1a) + b1b) + b2a) * scale + b2b) + x)."""
    torch.manual_seed(0)
    block = ResNetFixup(8, width=2).blocks[0]
    scalars = (block.bias1a, block.bias1b, block.bias2a, block.scale, block.bias2b)
    with torch.no_grad():
        block.conv2.weight.normal_()
        for value, scalar in zip((0.1, -0.2, 0.3, 1.7, -0.4), scalars, strict=True):
            scalar.fill_(value)
    x = torch.randn(3, 2, 5, 5)
    inner = nn.functional.conv2d(x + 0.1, block.conv1.weight, padding=1) - 0.2
    outer = nn.functional.conv2d(inner.clamp(min=0) + 0.3, block.conv2.weight, padding=1) * 1.7 - 0.4
    assert torch.allclose(block(x), (outer + x).clamp(min=0), atol=1e-6)


def test_fixup_initialisation() -> None:
    """First convolution He times L^-1/2, second zero, last layer zero, biases 0, multipliers 1."""
    torch.manual_seed(0)
    model = ResNetFixup(32)
    assert model.num_blocks == 15
    for block in model.blocks:
        fan_out = block.conv1.out_channels * 9
        assert block.conv1.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out / 15), rel=0.1)
        assert not bool(block.conv2.weight.any())
        assert [float(b.detach()) for b in (block.bias1a, block.bias1b, block.bias2a, block.bias2b)] == [
            0.0
        ] * 4
        assert float(block.scale.detach()) == 1.0
    assert model.stem.weight.std().item() == pytest.approx(math.sqrt(2 / (16 * 9)), rel=0.1)
    assert not bool(model.last.weight.any())
    assert not bool(model.last.bias.any())


@every_network
def test_zero_last_layer_is_an_option(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    assert not bool(network(8, zero_last_layer=True)(x).any())
    weight = network(8, zero_last_layer=False, num_outputs=50).last.weight
    assert weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert bool(network(8).last.weight.any()) == (network is not ResNetFixup)


@pytest.mark.parametrize(("network", "expected"), [(ResNetFixup, False), (ResNetGN, False), (ResNetBN, True)])
def test_batch_statistics_is_data_and_true(network: type[nn.Module], expected: bool) -> None:
    """G01: the attribute tells whether an output depends on the other images, and it does just then."""
    torch.manual_seed(0)
    assert network.batch_statistics is expected
    model = network(8, width=8, zero_last_layer=False)
    x = torch.randn(4, 3, 8, 8)
    alone = model(x[:2])
    together = model(x)[:2]
    assert torch.allclose(alone, together, atol=1e-5) is not expected


def without_in_place(model: nn.Module) -> nn.Module:
    """Return a copy whose modules have ``inplace`` set to False where they have it."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return model


@every_network
def test_no_in_place_operations(network: type[nn.Module]) -> None:
    """G08: no tensor that a submodule returned is changed afterwards; nothing in the source asks for it."""
    model = network(8, width=8)
    seen: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(
            lambda _module, _args, output: seen.append((output, output.detach().clone()))
        )
    x = torch.randn(2, 3, 8, 8)
    before = x.clone()
    output = model(x)
    assert torch.equal(x, before)
    assert all(torch.equal(now.detach(), then) for now, then in seen)
    assert torch.equal(without_in_place(model)(x), output)
    for source in Path(models.__file__).parent.glob("*.py"):
        assert "inplace=True" not in source.read_text(encoding="utf-8")


@every_network
@pytest.mark.parametrize(
    ("depth", "near"),
    [
        (30, "26 and 32"),
        (9, "8 and 14"),
        (2, "8, 14, 20, 26, 32"),
        (0, "8, 14"),
        (32.0, "8, 14"),
        ("32", "8, 14"),
    ],
)
def test_depths_that_are_rejected(network: type[nn.Module], depth: Any, near: str) -> None:
    with pytest.raises(ValueError, match=f"depth must be 6 n \\+ 2.*got {depth!r}.*{near}"):
        network(depth)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (ResNetFixup, {"width": 0}, "width must be a whole number of at least 1, got 0"),
        (ResNetFixup, {"in_channels": 1.5}, "in_channels must be a whole number"),
        (ResNetBN, {"num_outputs": True}, "num_outputs must be a whole number"),
        (ResNetBN, {"bn_momentum": 0.0}, "bn_momentum must be a number in"),
        (ResNetBN, {"bn_momentum": "0.1"}, "bn_momentum must be a number in"),
        (ResNetGN, {"num_groups": 3}, "num_groups must divide width = 16, got 3; valid are"),
        (ResNetGN, {"num_groups": 0}, "num_groups must be a whole number"),
    ],
)
def test_options_that_are_rejected(network: type[nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(8, **options)


@every_network
@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 8), (3, 8, 8)])
def test_images_of_the_wrong_shape_are_rejected(network: type[nn.Module], shape: tuple[int, ...]) -> None:
    """D07: the number of channels must be the network's."""
    with pytest.raises(ValueError, match=r"takes images \[B, 3, H, W\].*in_channels"):
        network(8)(torch.zeros(shape))


def test_bn_momentum_reaches_every_layer() -> None:
    """T16: the momentum of the running statistics is an option."""
    layers = [m for m in ResNetBN(8, bn_momentum=0.25).modules() if isinstance(m, nn.BatchNorm2d)]
    assert {layer.momentum for layer in layers} == {0.25}
    assert len(layers) == 7


def test_num_groups_reaches_every_layer() -> None:
    layers = [m for m in ResNetGN(8, num_groups=4).modules() if isinstance(m, nn.GroupNorm)]
    assert {layer.num_groups for layer in layers} == {4}
    assert {layer.num_channels for layer in layers} == {16, 32, 64}
