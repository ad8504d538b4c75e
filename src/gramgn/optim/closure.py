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

from gramgn.optim.guards import check_modes, check_parameters
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.trees import Build, flatten, tensors_in

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
            "not parameters of the model that was given: pass parameters of that model, which also holds what else "
            "is trained (model.coefficient = nn.Parameter(...)), and build a new optimizer after replacing a module. "
            "Copy the two together: copy.deepcopy((model, optimizer))"
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
    run: Callable[[Forward, tuple[Any, ...], dict[str, Any]], tuple[Any, int | None]],
) -> tuple[Reading, int]:
    """Call `closure` with `model.forward` replaced by `run`; return what was read and the number of samples b.

    `run` is given the model's own forward and the arguments of one call; it returns what the closure gets to see, and
    the number of samples of this call, or None where it is not known. b is that of the first call, or else that of the
    residuals.
    """
    calls: list[tuple[Any, int | None]] = []
    device = next(model.parameters()).device

    def forward(original: Forward, *args: Any, **kwargs: Any) -> Any:
        check_modes(device)
        if not torch.is_grad_enabled():  # a constant, as of a target network
            return original(*args, **kwargs)
        returned, num_samples = run(original, args, kwargs)
        if num_samples == 0:
            raise ValueError("the model must be called with a tensor that holds at least one sample [b, ...]")
        if not calls:
            calls.append((first_tensor(returned), num_samples))
        return returned

    with replaced_forward(model, forward):
        returned = closure()
    if not calls:
        raise ValueError(
            "the closure did not call the model; it must call model(...), the very module that was given to "
            "the optimizer (not a part of it, a copy, or another method), and not under torch.no_grad. Residuals "
            "of parts of a model are terms, step(terms=[Term(residual, x), ...]); engine='rows' takes any closure"
        )
    ((output, num_samples),) = calls
    if num_samples is None:
        output, num_samples = leading(returned)
    return loss.read(returned, output, num_samples), num_samples


def leading(returned: Any) -> tuple[Any, int]:
    """Return the residuals or logits that a closure returned, and their leading dimension."""
    first = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    return first, len(first) if isinstance(first, Tensor) and first.ndim else 1


def first_tensor(returned: Any) -> Tensor:
    """Return the first tensor among a model's outputs."""
    for tensor in tensors_in(returned):
        return tensor
    raise ValueError(f"the model returned no tensor, but {type(returned).__name__}")


@contextmanager
def replaced_forward(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Let `model(...)` call `forward` with the model's own forward as first argument."""
    attributes, original, called = vars(model), model.forward, [forward]
    own = attributes.get("forward")
    attributes["forward"] = lambda *args, **kwargs: called[0](original, *args, **kwargs)
    try:
        yield
    finally:
        called.clear()  # a snapshot of the module may outlive it, and belong to what it calls
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


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Build]:
    """Return the leaves of the arguments of a call, and what builds (args, kwargs) from leaves."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]], _of_one_tensor
    return flatten((args, kwargs))


def _of_one_tensor(leaves: Sequence[Any]) -> tuple[tuple[Any], dict[str, Any]]:
    return (leaves[0],), {}


class Batch:
    """The arguments of the model's call, and which of them have one entry per sample.

    The first tensor holds the batch in its leading dimension; so does every other tensor with the same leading size.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self.build = flatten_call(args, kwargs)
        self.given = leaves
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        sizes = [leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
        if not sizes or sizes[0] == 0:
            raise ValueError(
                "the model must be called with a tensor that holds at least one sample [b, ...] (also in tuples, dicts "
                "and dataclasses); engine='rows' takes any call, and one of several ranks that has no samples calls "
                "step(None)"
            )
        self.size: int = sizes[0]
        self.batched = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.size for leaf in self.leaves
        ]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """Return the batch of a call, or None where no argument is a tensor with samples."""
        try:
            return cls(args, kwargs)
        except ValueError:
            return None

    def copy(self) -> Batch:
        """Return the batch with tensors of its own, for a forward that changes its input in place."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return Batch(*self.build(leaves))

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
        args, kwargs = self.build(leaves)
        return args, kwargs
