"""One sample out of the arguments of a call, and a call past the hooks that ran already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Batch:
    """The arguments of the model's call, and which of them have one entry for each sample.

    The first tensor holds the batch in its leading dimension; so does every other tensor with the same
    leading size.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        sizes = [leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
        if not sizes or sizes[0] == 0:
            raise ValueError("the model must be called with a tensor that holds at least one sample [b, ...]")
        self.size: int = sizes[0]
        self.batched = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.size for leaf in self.leaves
        ]

    def part(self, start: int, stop: int) -> list[Tensor]:
        """Return the tensors with one entry for each sample, cut to a range of samples."""
        return [leaf[start:stop] for leaf, batched in zip(self.leaves, self.batched, strict=True) if batched]

    def chunk(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call on a range of samples."""
        leaves = [
            leaf[start:stop] if batched else leaf
            for leaf, batched in zip(self.leaves, self.batched, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def arguments(self, sample: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call on one sample, as a batch of one."""
        of_sample = iter(sample)
        leaves = [
            next(of_sample).unsqueeze(0) if batched else leaf
            for leaf, batched in zip(self.leaves, self.batched, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


class OwnForward(nn.Module):
    """Calls the model's own forward, past the replaced one and past the hooks: they ran in the outer call."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


def check_per_sample(
    model: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> None:
    """Refuse a model whose outputs on the whole batch are not those on single samples.

    Done at the first step, and again where other arguments have one entry for each sample. A model that draws
    random numbers, such as dropout, is told by two passes that differ, and cannot be compared.
    """
    cards = [output.device] if output.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=cards):
        whole, again = original(*args, **kwargs), original(*args, **kwargs)
    if not isinstance(whole, Tensor) or not torch.equal(whole, again) or not torch.isfinite(whole).all():
        return
    output = output.detach()
    eps = max(torch.finfo(t.dtype).eps for t in (whole, *model.parameters()) if t.is_floating_point())
    tolerance = eps**0.5 * whole.abs().max()
    if whole.shape == output.shape and bool((whole - output).abs().max() <= tolerance):
        return
    raise ValueError(
        f"{type(model).__name__} gives a sample other outputs within a batch than alone: an output depends on "
        "other samples (such as x - x.mean(0)), or a tensor that all samples share has as many entries as the "
        "batch and was split among them. Make every output depend on its own sample only, hand shared tensors "
        "to the model at construction, or take engine='loop'"
    )
