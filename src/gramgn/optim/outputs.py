"""What the model returns to the closure, and the derivative of the residuals by it.

b samples, k residuals (or logits) per sample, q outputs per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gramgn.optim.closure import Trained
from gramgn.optim.losses import DETACHED, Reading
from gramgn.optim.runtime import is_capturing, probe_weights
from gramgn.optim.trees import flatten

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


class NotBySampleError(ValueError):
    """The residuals are no function of the model's outputs, sample by sample, so that only their whole graph has J.

    Args:
        reason: What the closure does, as a clause.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}: use engine='rows' or, where each residual belongs to one sample, terms: "
            "step(terms=[Term(residual, x), ...])"
        )
        self.reason = reason


BY_INPUTS = (
    "the residuals depend on trained parameters other than through the model's outputs, as derivatives of the model by "
    "its inputs do"
)

OTHER_PARAMETERS = "the closure calls the model with other parameters than its own, as functional_call does"
NESTED = "the closure calls the model on what depends on trained parameters"


class Outputs:
    """The tensors [b, ...] that the model returns to the closure in one step, of which the residuals are a function.

    Args:
        trained: The trained parameters.
        cut: Whether the closure gets tensors without the network's graph. Derivatives by the inputs of the model then
            raise `NotBySampleError`, in place of being zero.

    Attributes:
        tensors: The tensors, with the network's graph unless it is cut.
    """

    def __init__(self, trained: Trained, *, cut: bool) -> None:
        self.tensors: list[Tensor] = []
        self._params = {id(param) for param in trained.params.values()}
        self._cut, self._b = cut, 0
        self._edges: list[GradientEdge] = []  # of the copies that the closure gets
        self._reason = ""  # why there are outputs that are not among the tensors
        self._nested = False  # whether the model was called on what depends on one of its outputs

    def add(self, returned: Any, b: int, inputs: Sequence[Any]) -> Any:
        """Add what the model returned for b samples, called with `inputs`; return what the closure gets to see.

        These are copies, so that a closure may change them in place.
        """
        self._b = self._b or b
        if b != self._b:
            self.leave_out(f"the closure calls the model on {self._b} samples, and on {b}")
        sources = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
        by_sample = b == self._b and self._are_inputs(sources)
        alarm = _Alarm.apply(BY_INPUTS, *sources) if sources and self._cut else None
        leaves, build = flatten(returned)
        return build([self._shown(leaf, b, alarm, by_sample) for leaf in leaves])

    def leave_out(self, reason: str) -> None:
        """Note why outputs are not among the tensors."""
        self._reason = self._reason or reason

    def _are_inputs(self, sources: Sequence[Tensor]) -> bool:
        """Return whether arguments of a call depend on trained parameters through outputs at most."""
        if not sources:
            return True
        try:
            nested = bool(self._reached(sources))
        except NotBySampleError:
            nested = False
            self.leave_out(NESTED)
        if self._cut and (nested or self._reason == NESTED):
            raise NotBySampleError(NESTED)
        self._nested |= nested
        return self._reason != NESTED

    def _shown(self, leaf: Any, b: int, alarm: Tensor | None, by_sample: bool) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if self._cut:
            leaf = leaf.detach().requires_grad_()
        elif not leaf.requires_grad:
            return leaf
        by_sample = by_sample and (leaf.shape[0] == b if leaf.ndim else b == 1)
        if not by_sample:
            self.leave_out(
                f"the closure uses an output {list(leaf.shape)} of the model called on {b} samples"
            )
            if self._cut:
                alarm = _Alarm.apply(self._reason, leaf)
        shown = leaf.clone() if alarm is None else _Joined.apply(leaf, alarm)
        if by_sample:
            self.tensors.append(leaf)
            self._edges.append(get_gradient_edge(shown))
        return shown

    def slopes(self, reading: Reading) -> tuple[Tensor, list[int]]:
        """Return dr/df [b, k, q], and the numbers of the tensors of whose entries f consists.

        That is, each sample's residuals (R^T times its logits) by its own outputs, as far as residuals depend on them.

        Raises:
            NotBySampleError: The residuals depend on another sample's output, or on parameters past the outputs.
        """
        given = reading.differentiated
        b = len(given)
        k = given.numel() // b
        if len(self.tensors) == 1 and given.numel() == self.tensors[0].numel() and self._is_difference(given):
            like = self.tensors[0]
            eye = torch.eye(k, dtype=like.dtype, device=like.device) if k > 1 else like.new_ones(1, 1)
            slopes, used = eye.expand(b, k, k), [0]
        else:
            r = given.reshape(b, -1)
            used = sorted(self._reached([r]))
            if not used:
                raise ValueError(DETACHED)
            if self._nested and len(used) > 1:
                raise NotBySampleError("the closure uses outputs of the model, and calls it on them as well")
            slopes = self._differentiated(r, used)
        return (slopes if reading.root is None else reading.root.mT.to(slopes.dtype) @ slopes), used

    def _is_difference(self, r: Tensor) -> bool:
        """Return whether r is certainly f, or f less constants, in the order of the outputs f: dr/df is the identity.

        The residuals of most closures are: what autograd would return then is known. `r` has as many entries as f.
        """
        if r._backward_hooks:
            return False
        node: Any = r.grad_fn
        while node is not self._edges[0].node:
            if node is None or node.name() not in _KEEP_ORDER:
                return False
            (node, _), *others = node.next_functions
            if any(other is not None for other, _ in others):
                return False
        return True

    def _reached(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return the numbers of the outputs on which tensors depend; reject another way to trained parameters."""
        numbers = {(edge.node, edge.output_nr): i for i, edge in enumerate(self._edges)}
        used, seen = set(), set()
        waiting: list[Any] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)]
        while waiting:
            edge = waiting.pop()
            node = edge[0]
            if node is None or edge in seen:
                continue
            seen.add(edge)
            if edge in numbers:
                used.add(numbers[edge])
                continue
            if isinstance(node, _Alarm._backward_cls):
                raise NotBySampleError(node.reason)
            if id(getattr(node, "variable", None)) in self._params:
                raise NotBySampleError(self._reason or BY_INPUTS)
            waiting += node.next_functions
        return used

    def _differentiated(self, r: Tensor, used: Sequence[int]) -> Tensor:
        """Return dr/df [b, k, q] of r [b, k] by some of the tensors."""
        edges, outputs = [self._edges[i] for i in used], [self.tensors[i] for i in used]
        rows = []
        for column in r.unbind(dim=1):
            grads = torch.autograd.grad(column.sum(), edges, retain_graph=True, allow_unused=True)
            pairs = zip(grads, outputs, strict=True)
            row = joined([torch.zeros_like(f) if grad is None else grad for grad, f in pairs])
            rows.append(row.reshape(self._b, -1))
        slopes = torch.stack(rows, dim=1)
        if not is_capturing():
            # Weights on rows must come back as weights on slopes, row by row.
            weights = probe_weights(r.numel(), r.device).reshape(r.shape).to(r.dtype)
            mixed = joined(torch.autograd.grad((r * weights).sum(), edges, retain_graph=True))
            own = torch.einsum("bk,bkq->bq", weights.to(slopes.dtype), slopes)
            error, scale = (mixed.reshape(own.shape) - own).abs().max(), slopes.abs().max()
            if error > torch.finfo(slopes.dtype).eps ** 0.5 * scale:
                raise NotBySampleError(
                    "a residual depends on the output of another sample (such as f - f.mean())"
                )
        return slopes


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return outputs [b, ...] next to each other, [b, q]; the only one as it is."""
    if len(tensors) == 1:
        return tensors[0]
    flat = [tensor.reshape(len(tensor) if tensor.ndim else 1, -1) for tensor in tensors]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in flat))
    return torch.cat([tensor.to(dtype) for tensor in flat], dim=1)


class _Alarm(torch.autograd.Function):
    """A zero whose derivative by `sources` must not be asked for."""

    @staticmethod
    def forward(ctx: Any, reason: str, *sources: Tensor) -> Tensor:
        ctx.reason = reason
        return sources[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotBySampleError(ctx.reason)


class _Joined(torch.autograd.Function):
    """A copy of an output, with an alarm."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, alarm: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def transform_around(inputs: Sequence[Any]) -> str:
    """Return what torch.func, or forward mode, does to the inputs of a call, as a clause; empty for plain tensors."""
    if forward_ad._current_level >= 0:
        return "the closure differentiates the model by its inputs in forward mode"
    if any(isinstance(leaf, Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in inputs):
        return "the closure calls the model inside of a transform of torch.func"
    return ""
