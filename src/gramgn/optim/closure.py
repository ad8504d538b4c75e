"""The user's closure and its parts: which parameters it trains, the one call of the model, the residuals' slopes.

b samples, q outputs per sample, k residuals (or logits) per sample. An engine calls the closure once, with
`model.forward` replaced for the length of the call, and so gets hold of the outputs inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramgn.optim.guards import check_modes, check_parameters
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.runtime import is_capturing, probe_weights

_KEEP_ORDER = frozenset(
    (
        "CloneBackward0",
        "SubBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "UnsqueezeBackward0",
        "ViewBackward0",
    )
)
"""Operations with derivative 1 in their first argument that keep the order of its entries, if not their number."""

Closure = Callable[[], Any]
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Trained:
    """The parameters that a step trains.

    Attributes:
        params: By their names in the model.
        groups: The number of each parameter's group, in the same order.
        num_groups: The number of groups in the optimizer; some may have nothing to train.
    """

    params: dict[str, Tensor]
    groups: tuple[int, ...]
    num_groups: int


def trainable(model: nn.Module, grouped: Sequence[Sequence[Tensor]], *, everything: bool) -> Trained:
    """Return the optimizer's parameters that currently require gradients.

    `everything`: they are meant to be all trainable parameters of the model, so that others are rejected.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    foreign = [param for group in grouped for param in group if id(param) not in names]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the optimizer's parameters (the first of shape {list(foreign[0].shape)}) are "
            "not parameters of the model that was given: pass parameters of that model, and build a new "
            "optimizer after replacing a module. Copy the two together: copy.deepcopy((model, optimizer))"
        )
    group_of = {id(param): number for number, group in enumerate(grouped) for param in group}
    new = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in group_of]
    if everything and new:
        raise ValueError(
            f"the model has trainable parameters that this optimizer does not know ({', '.join(new)}), "
            "because they were added or unfrozen after it was built: build a new optimizer"
        )
    params = {names[id(p)]: p for group in grouped for p in group if p.requires_grad}
    if not params:
        raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to train")
    check_parameters(params)
    return Trained(params, tuple(group_of[id(p)] for p in params.values()), len(grouped))


def call_closure(
    model: nn.Module,
    closure: Closure,
    loss: Loss,
    run: Callable[[Forward, tuple[Any, ...], dict[str, Any]], tuple[Tensor, int]],
) -> tuple[Reading, int]:
    """Call `closure` with `model.forward` replaced by `run`; return what was read and the number of samples b.

    `run` is given the model's own forward and the arguments of the call; it returns the outputs [b, ...] that the
    closure gets to see, and b. What was read is connected to these outputs by autograd.
    """
    calls: list[tuple[Tensor, int]] = []
    device = next(model.parameters()).device

    def forward(original: Forward, *args: Any, **kwargs: Any) -> Tensor:
        if calls:
            raise ValueError(
                "the closure called the model twice; it must call it exactly once, on the whole batch: call it "
                "on the concatenated inputs, model(torch.cat([x1, x2])), and split the output"
            )
        check_modes(device)
        output, num_samples = run(original, args, kwargs)
        if num_samples == 0:
            raise ValueError("the model must be called with a tensor that holds at least one sample [b, ...]")
        calls.append((output, num_samples))
        return output

    with _replaced_forward(model, forward):
        returned = closure()
    if not calls:
        raise ValueError(
            "the closure did not call the model; it must call model(...), the very module that was given to "
            "the optimizer, exactly once (not a part of it, a copy, or another method)"
        )
    (output, num_samples) = calls[0]
    return loss.read(returned, output, num_samples), num_samples


@contextmanager
def _replaced_forward(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Let `model(...)` call `forward` with the model's own forward as first argument."""
    attributes, original = vars(model), model.forward
    own = attributes.get("forward")
    attributes["forward"] = lambda *args, **kwargs: forward(original, *args, **kwargs)
    try:
        yield
    finally:
        del attributes["forward"]
        if own is not None:
            attributes["forward"] = own


class OwnForward(nn.Module):
    """Calls the model's own forward, without the replaced one and without hooks: they ran in the outer call."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.own_forward(*args, **kwargs)

    # Without the hooks that are registered for all modules.
    __call__ = forward


_OF_ONE_TENSOR = pytree.tree_structure(((0,), {}))


class Batch:
    """The arguments of the model's call, and which of them have one entry per sample.

    The first tensor holds the batch in its leading dimension; so does every other tensor with the same leading size.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any]
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            leaves, self.structure = [args[0]], _OF_ONE_TENSOR
        else:
            leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        sizes = [leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
        if not sizes or sizes[0] == 0:
            raise ValueError("the model must be called with a tensor that holds at least one sample [b, ...]")
        self.size: int = sizes[0]
        self.batched = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.size for leaf in self.leaves
        ]

    def copy(self) -> Batch:
        """Return the batch with tensors of its own, for a forward that changes its input in place."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return Batch(args, kwargs)

    def part(self, start: int, stop: int) -> list[Tensor]:
        """Return the tensors with one entry per sample, cut to a range of samples."""
        return [leaf[start:stop] for leaf, batched in zip(self.leaves, self.batched, strict=True) if batched]

    def chunk(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call on a range of samples."""
        return self._with(self.part(start, stop))

    def arguments(self, sample: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call on one sample, as a batch of one."""
        return self._with([tensor.unsqueeze(0) for tensor in sample])

    def _with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `tensors` in place of those that have one entry per sample."""
        given = iter(tensors)
        leaves = [
            next(given) if batched else leaf for leaf, batched in zip(self.leaves, self.batched, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


def slopes_of(reading: Reading, outputs: Tensor, model: nn.Module) -> Tensor:
    """Return dr/df [b, k, q]: each sample's residuals (R^T times its logits) by its own q outputs.

    Rejects residuals that depend on another sample's output, or on parameters other than through the outputs.
    """
    r = reading.differentiated.reshape(len(reading.differentiated), -1)
    b, k = r.shape
    if k * b == outputs.numel() and _is_difference(reading.differentiated, outputs):
        eye = torch.eye(k, dtype=outputs.dtype, device=outputs.device) if k > 1 else outputs.new_ones(1, 1)
        slopes = eye.expand(b, k, k)
        return slopes if reading.root is None else reading.root.mT.to(slopes.dtype)
    others = [param for param in model.parameters() if param.requires_grad]
    grads = [
        torch.autograd.grad(column.sum(), [outputs, *others], retain_graph=True, allow_unused=True)
        for column in r.unbind(dim=1)
    ]
    if any(grad is not None for column in grads for grad in column[1:]):
        raise ValueError(
            "the residuals depend on parameters other than through the model's output; put everything that "
            "is trained inside of model(...), or use engine='loop'"
        )
    slopes = torch.stack([column[0].reshape(len(r), -1) for column in grads], dim=1)
    if not is_capturing():
        _check_own_sample(r, outputs, slopes)
    return slopes if reading.root is None else reading.root.mT.to(slopes.dtype) @ slopes


def _is_difference(r: Tensor, outputs: Tensor) -> bool:
    """Return whether r is certainly f, or f less constants, in the order of the outputs f: dr/df is the identity.

    The residuals of most closures are: what autograd would return then is known. `r` has as many entries as f.
    """
    node = None if r._backward_hooks else r.grad_fn
    while node is not None:
        kind, (after, *others) = node.name(), (after for after, _ in node.next_functions)
        if kind not in _KEEP_ORDER or any(other is not None for other in others) or after is None:
            return False
        leaf = getattr(after, "variable", None)
        if leaf is not None:
            return leaf is outputs
        node = after
    return False


def _check_own_sample(r: Tensor, outputs: Tensor, slopes: Tensor) -> None:
    """Reject residuals that mix samples: weights on rows must come back as weights on slopes, row by row."""
    weights = probe_weights(r.numel(), r.device).reshape(r.shape).to(r.dtype)
    (mixed,) = torch.autograd.grad((r * weights).sum(), outputs)
    own = torch.einsum("bk,bkq->bq", weights.to(slopes.dtype), slopes)
    error, scale = (mixed.reshape(own.shape) - own).abs().max(), slopes.abs().max()
    if error > torch.finfo(slopes.dtype).eps ** 0.5 * scale:
        raise ValueError(
            "a residual depends on the output of another sample (such as f - f.mean()); each must depend on "
            "its own sample only, or use engine='loop'"
        )
