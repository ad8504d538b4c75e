"""Channels-last memory format: the same numbers in the order that convolutions are fastest in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gramgn.errors import first_line
from gramgn.training._data import TensorData
from gramgn.training._seeding import rng_state, set_rng_state


def use_channels_last(model: nn.Module, data: TensorData, say: Callable[[str], None]) -> bool:
    """Put weights of four dimensions and the batches of images into ``torch.channels_last``.

    A network that cannot take them (one with ``x.view(...)`` behind a convolution, say) stays as it was.

    Args:
        model: On its device.
        data: On the same device.
        say: Told where the network does not take channels-last images.

    Returns:
        Whether the format is in force. It is not for data that are no images ``[b, C, H, W]``.
    """
    if data.batch("train", slice(0, 1))[0].ndim != 4:
        return False
    _convert(model, torch.channels_last)
    data.memory_format = torch.channels_last
    try:
        _try_forward(model, data)
    except RuntimeError as error:
        _convert(model, torch.contiguous_format)
        data.memory_format = torch.contiguous_format
        say(
            f"note: {type(model).__name__} does not take channels-last images ({first_line(error)}); "
            "it gets contiguous ones, as with trainer.channels_last=false"
        )
        return False
    return True


def _convert(model: nn.Module, memory_format: torch.memory_format) -> None:
    # Not Module.to(memory_format=...): that fails on a parameter of five dimensions.
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _try_forward(model: nn.Module, data: TensorData) -> None:
    """Try two images, in evaluation mode and with the random state put back: nothing is changed by it."""
    before, was_training = rng_state(), model.training
    model.eval()
    try:
        with torch.no_grad():
            model(data.batch("train", slice(0, 2))[0])
    finally:
        model.train(was_training)
        set_rng_state(before)
