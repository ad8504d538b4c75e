"""Verification of J against autograd: a wrong engine must not be silent.

Some networks defeat an engine: they mix samples, pass intermediate results out of a module by a side door, or change
their state from call to call. J would then be wrong without any sign of it. Therefore J^T w is compared, parameter by
parameter, with an ordinary backward pass, for weights w that differ from row to row: over the whole batch, or over
other chunks where it is divided; in the steps 1, 2, 4 and 8, when the network is run in a new way, at least every
`EVERY` steps, and whenever a block of J that was never seen to agree has become other than zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gramgn.optim.closure import Batch, Forward
from gramgn.optim.guards import check_graph
from gramgn.optim.runtime import (
    REDUCED_EPS,
    attention_by_products,
    full_precision,
    is_capturing,
    probe_weights,
    run_in_mode,
)
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.trees import tensors_in

EARLY, EVERY = (1, 2, 4, 8), 100
"""The first steps that are compared, and the number of steps after which the next comparison is due."""

MOST = 1000
"""The number of ways of running a network that are remembered; the oldest are forgotten and compared again."""

GROWTH = 4
"""A block that a comparison found too small to judge is compared again once it has grown by this factor."""

SLACK = 10.0
"""The greatest error, in sqrt(eps), between two passes: rounding switches ReLUs whose input is almost zero."""

ROUNDINGS = 256
"""The greatest difference, in eps, between outputs of which only those of other samples were changed."""

CONSTANTS = (0.6, 0.05, 0.95)
"""What replaces random numbers in [0, 1) in a comparison, one after the other until each parameter is verified."""


@dataclass
class _Record:
    """What is known about one way of running the network."""

    last: int = 0  # the step of the last comparison that succeeded; 0: none
    verified: set[str] = field(default_factory=set)  # parameters whose part of J was seen to agree
    sizes: dict[str, float] = field(default_factory=dict)  # of the other blocks, relative to J, when compared


def structure_of(model: nn.Module, batch: Batch, params: Mapping[str, Tensor]) -> Hashable:
    """Return what identifies a way of calling the network, before it is called."""
    return (
        tuple(batch.batched),
        tuple((leaf.shape, leaf.dtype) for leaf in batch.leaves if isinstance(leaf, Tensor)),
        tuple(
            (
                module.training,
                len(module._forward_pre_hooks),
                len(module._forward_hooks),
                "forward" in vars(module),
            )
            for module in model.modules()
        ),
        tuple(params),
    )


CAUSES = (
    "Either the network mixes samples (as in x - x.mean(dim=0), or by a leading dimension that is not the samples'): "
    "each output must depend on its own sample only. Or a tensor that all samples share has as many entries as the "
    "batch and was split among the samples: pass it to the model at construction. Or its outputs change from call to "
    "call, by a state that it keeps (as spectral_norm's in training mode) or by random numbers that are not "
    "torch's"
)

Explain = Callable[[str, float | None], str]
"""Says what is wrong: with the outputs of a model of this name, or with a parameter's J by its relative error."""


def explained(name: str, error: float | None) -> str:
    """Return the message of an engine that takes samples of a batch; see `Explain`."""
    if error is None:
        return f"{name} returns other outputs within a batch than for one sample alone. {CAUSES}. Or use engine='loop'"
    return (
        f"parameter '{name}': the Jacobian that the engine formed is not autograd's (relative error {error:.0e}). "
        f"{CAUSES}. Or the network uses the parameter in a way that this engine cannot follow (a module that passes "
        "intermediate results to others): use engine='rows'. Or it contains a gradient that is no derivative"
    )


class Verifier:
    """Remembers what has been compared. It is not saved: a resumed run compares anew, which changes no step."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}
        self._steps = 0

    def begin(self, structure: Hashable, params: Mapping[str, Tensor]) -> Check | None:
        """Count a step and return its check, or None while a CUDA graph is being captured.

        `structure` identifies what was called, with which shapes and in which mode.
        """
        if is_capturing():
            return None
        self._steps += 1
        record = self._records.setdefault(structure, _Record())
        if len(self._records) > MOST:
            del self._records[next(iter(self._records))]
        due = not record.last or self._steps in EARLY or self._steps - record.last >= EVERY
        return Check(record, params, self._steps, due)


class Check:
    """Whether J is compared in one step.

    Attributes:
        params: The trained parameters by name.
        due: Whether it is compared in any case.
        unverified: The names of the parameters whose part of J was never seen to agree and other than zero.
    """

    def __init__(self, record: _Record, params: Mapping[str, Tensor], step: int, due: bool) -> None:
        self.params, self.due = params, due
        self.unverified = [name for name in params if name not in record.verified]
        self._record, self._step = record, step
        self._sizes: dict[str, float] = {}

    def woke(self, norms: Mapping[str, Tensor], whole: float) -> bool:
        """Return whether a block of an unverified parameter has become other than zero.

        Args:
            norms: The Frobenius norms of the blocks of the unverified parameters.
            whole: The Frobenius norm of J.
        """
        if not norms:
            return False
        values = torch.stack([norm.to(torch.float32) for norm in norms.values()]).tolist()
        sizes = {name: value / max(whole, 1e-300) for name, value in zip(norms, values, strict=True)}
        # Smaller ones are rounding, as those of a bias in front of a normalisation.
        noise = max(torch.finfo(param.dtype).eps for param in self.params.values())
        self._sizes = {name: size for name, size in sizes.items() if size > noise}
        return any(size > GROWTH * self._record.sizes.get(name, 0.0) for name, size in self._sizes.items())

    def is_needed(self, blocks: Mapping[str, Tensor]) -> bool:
        """Return whether J with these blocks [..., size] is to be compared."""
        if not self.unverified:
            return self.due
        norms = dict(zip(blocks, torch._foreach_norm(list(blocks.values())), strict=True))
        whole = float(torch.stack(list(norms.values())).norm())
        return self.woke({name: norms[name] for name in self.unverified}, whole) or self.due

    @contextmanager
    def recorded(self) -> Iterator[set[str]]:
        """Record that the comparison made inside succeeded; one that failed is due again in the next step.

        The set that is entered takes the names of the parameters that it verifies.
        """
        self._record.last = 0
        verified: set[str] = set()
        yield verified
        self._record.last = self._step
        self._record.verified |= verified
        for name, size in self._sizes.items():
            self._record.sizes[name] = max(size, self._record.sizes.get(name, 0.0))


class Comparison:
    """J^T w for weights w [b, k], from the engine (`pulled`, which it fills) and from autograd.

    Args:
        params: The trained parameters by name.
        b: Number of samples.
        k: Number of residuals per sample.
        eps: The relative precision in which J is formed; lowered to that of the graphs from which it is expected.
        slack: The greatest relative error of a parameter's part, in sqrt(eps).
    """

    def __init__(
        self, params: Mapping[str, Tensor], b: int, k: int, eps: float, *, slack: float = 3.0
    ) -> None:
        device = next(iter(params.values())).device
        self.weights = probe_weights(b * k, device).view(b, k)
        self.pulled: dict[str, Tensor] = {}
        self.state: Snapshot | None = None  # that an engine restores which runs the batch in parts
        self._params, self._slack = params, slack
        self.eps = max(eps, *(torch.finfo(param.dtype).eps for param in params.values()))
        self._expected: dict[str, Tensor] = {}

    def expect(
        self, output: Tensor, slopes: Tensor | None = None, first: int = 0, *, keep_graph: bool = True
    ) -> None:
        """Add autograd's J^T w for the samples from number `first` with these outputs.

        `slopes` is dr/df [samples, k, q]; None: the residuals are the outputs.
        `keep_graph`: whether it is still needed.
        """
        self.eps = max(self.eps, check_graph(output, short=self.eps >= REDUCED_EPS["bf16"]))
        w = self.weights[first : first + (len(output) if output.ndim else 1)].to(output.device)
        if slopes is not None:
            dtype = torch.promote_types(slopes.dtype, output.dtype)
            w = torch.einsum("bk,bkq->bq", w.to(dtype), slopes.to(dtype))
        grads = torch.autograd.grad(
            output,
            list(self._params.values()),
            w.reshape(output.shape).to(output.dtype),
            retain_graph=keep_graph,
            allow_unused=True,
        )
        for name, grad in zip(self._params, grads, strict=True):
            if grad is not None:
                grad = grad.to_dense() if grad.is_sparse else grad
                held = self._expected.get(name)
                self._expected[name] = grad if held is None else held + grad

    def pull(self, blocks: Mapping[str, Tensor], first: int = 0) -> None:
        """Add the engine's J^T w for the samples from number `first`, with blocks [samples, k, size]."""
        for name, block in blocks.items():
            w = self.weights[first : first + len(block)].flatten().to(block.device, block.dtype)
            pulled = w @ block.flatten(end_dim=1)
            held = self.pulled.get(name)
            self.pulled[name] = pulled if held is None else held + pulled

    def compare(self, explain: Explain | None = None) -> set[str]:
        """Reject J where it is not autograd's; return the names of the parameters that it proves right."""
        expected = {
            name: self._expected[name] if name in self._expected else torch.zeros_like(param)
            for name, param in self._params.items()
        }
        sizes = {name: _largest(grad) for name, grad in expected.items()}
        largest = max(sizes.values())
        root = self.eps**0.5
        verified = set()
        for name, grad in expected.items():
            pulled = self.pulled.get(name)
            error = _largest(grad if pulled is None else pulled.view(grad.shape).to(grad.dtype) - grad)
            if _exceeds(error, self._slack * root * max(sizes[name], 0.01 * largest)):
                raise ValueError((explain or explained)(name, error / max(sizes[name], 1e-300)))
            if sizes[name] > 0.01 * self._slack * root * largest:
                verified.add(name)
        return verified


def verify(
    check: Check,
    model: nn.Module,
    b: int,
    plain: Callable[[Comparison], Tensor],
    engine: Callable[[Comparison], Tensor],
    *,
    k: int,
    explain: Explain = explained,
) -> None:
    """Compare an engine with one ordinary pass over the whole batch, both run anew and in full precision.

    Both start from the network's present state, which is the same again afterwards, and see constants instead of
    random numbers: an engine that takes samples one by one draws other masks than the ordinary pass.

    Args:
        check: The check of this step.
        model: The network.
        b: Number of samples.
        plain: Runs the network on copies of its arguments, fills what the comparison expects, and returns the outputs.
        engine: Runs the engine on such copies: fills `pulled` of the comparison and returns the outputs.
        k: Number of residuals per sample.
        explain: Says what is wrong.
    """
    first = next(iter(check.params.values()))
    eps = torch.finfo(first.dtype).eps
    state = Snapshot(model, first.device)
    with check.recorded() as verified:
        for constant in CONSTANTS:
            numbers, comparison = (
                ConstantRandomNumbers(constant),
                Comparison(check.params, b, k, eps, slack=SLACK),
            )
            # Fused attention draws its masks out of sight.
            with state.kept(), full_precision(), attention_by_products(), numbers, torch.enable_grad():
                expected = plain(comparison)
                state.restore()
                comparison.state = state
                output = engine(comparison)
            if not agree(output.detach().reshape(b, -1), expected.detach().reshape(b, -1), comparison.eps):
                raise ValueError(explain(type(model).__name__, None))
            verified |= comparison.compare(explain)
            if not numbers.drawn or len(verified) == len(check.params):
                return


def check_samples_apart(
    model: nn.Module, original: Forward, batch: Batch, num_samples: int, params: Mapping[str, Tensor]
) -> None:
    """Reject a call whose outputs for some samples change with the other samples of the batch, in any engine.

    Each half of the batch is run with one of its samples in all places of the other half. A call that does not return
    one entry per sample shows nothing.
    """
    b = batch.size
    if b != num_samples or b < 2:
        return
    state = Snapshot(model, next(model.parameters()).device)
    first, second = slice(0, b // 2), slice(b // 2, b)

    def run(tensors: Sequence[int], replaced: slice = second, by: int = 0) -> list[Tensor]:
        state.restore()
        leaves = list(batch.copy().leaves)
        for number in tensors:
            leaves[number][replaced] = leaves[number][by].clone()
        args, kwargs = batch.build(leaves)
        returned = tensors_in(original(*args, **kwargs))
        return [tensor.detach() for tensor in returned if tensor.is_floating_point()]

    def agrees(tensors: Sequence[int]) -> bool:
        for kept, replaced, by in ((first, second, 0), (second, first, -1)):
            for part, of_all in zip(run(tensors, replaced, by), whole, strict=True):
                by_sample = of_all.ndim and len(of_all) == b and part.shape == of_all.shape
                # What is not replaced is computed in the same places.
                bound = ROUNDINGS * torch.finfo(part.dtype).eps * _largest(of_all)
                if by_sample and _exceeds(_largest(part[kept] - of_all[kept]), bound):
                    return False
        return True

    # A tensor that all samples share may have as many entries as the batch.
    batched = [number for number, of_samples in enumerate(batch.batched) if of_samples]
    constants, products = ConstantRandomNumbers(CONSTANTS[0]), attention_by_products()
    with state.kept(), full_precision(), products, constants, without_zeros(params), torch.enable_grad():
        whole = run([])
        if not agrees(batched) and not agrees(batched[:1]):
            raise ValueError(explained(type(model).__name__, None))


@contextmanager
def without_zeros(params: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace zeros in parameters, which hide what is behind them, without a trace in a graph that saved them."""
    kept = [(param.data, param.detach().clone()) for param in params.values() if bool((param == 0).any())]
    try:
        for data, before in kept:
            other = 0.5 * probe_weights(data.numel(), data.device).view(data.shape).to(data.dtype)
            data.copy_(torch.where(before == 0, other, before))
        yield
    finally:
        for data, before in kept:
            data.copy_(before)


class ConstantRandomNumbers(TorchDispatchMode):
    """Replaces random numbers by constants that depend neither on a sample's place nor on its neighbours.

    Args:
        constant: The place in the range of a distribution, in (0, 1), at which it is replaced. Masks drawn by
            Bernoulli's distribution are replaced by their mean in the middle of it, and by 0 and 1 at the ends.

    Attributes:
        drawn: Whether there was any.
    """

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant, self.drawn = constant, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and overwrite what it drew."""
        kwargs = kwargs or {}
        result = run_in_mode(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        self.drawn = True
        # Arguments at their defaults are left out of the call.
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        kind = func._schema.name.removeprefix("aten::").rstrip("_")
        if kind == "native_dropout":
            kept, mask = result
            return kept.copy_(given["input"]).div_(1 - given["p"]), mask.fill_(True)
        if kind == "rrelu_with_noise":
            slope = (given["lower"] + given["upper"]) / 2
            given["noise"].copy_(torch.where(given["self"] <= 0, slope, 1.0))
            return result.copy_(given["self"] * given["noise"])
        if kind == "randperm":
            return result.copy_(torch.arange(len(result) - 1, -1, -1))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._overwrite(tensor, kind, given)
        return result

    def _overwrite(self, tensor: Tensor, kind: str, given: Mapping[str, Any]) -> None:
        if kind == "bernoulli":
            p = given["p"] if given.get("p") is not None else given["self"]
            if not tensor.is_floating_point() or not 0.1 < self.constant < 0.9:
                tensor.fill_(round(self.constant))
            else:
                tensor.copy_(p) if isinstance(p, Tensor) else tensor.fill_(p)
        elif not tensor.is_floating_point():
            tensor.fill_(given.get("low", given.get("from")) or 0)
        elif kind == "uniform":
            low, high = given["from"], given["to"]
            tensor.fill_(low + self.constant * (high - low))
        elif kind == "normal" and isinstance(given["mean"], float) and isinstance(given["std"], float):
            mean, std = given["mean"], given["std"]
            tensor.fill_(self.constant).mul_(std).add_(mean)
        else:
            tensor.fill_(self.constant)


def check_outputs(output: Tensor, model: nn.Module, b: int) -> Tensor:
    """Return the outputs of the whole batch, which must be one entry per sample."""
    if (output.shape[0] if output.ndim else 1) != b:
        raise ValueError(
            f"{type(model).__name__} returned {list(output.shape)} for {b} samples; its output must keep the batch in "
            "the leading dimension, [b] or [b, k]"
        )
    return output


def agree(output: Tensor, expected: Tensor, eps: float) -> bool:
    """Return whether outputs agree within rounding."""
    if output.shape != expected.shape:
        return False
    return not _exceeds(_largest(output.to(expected.dtype) - expected), eps**0.5 * _largest(expected))


def _exceeds(error: float, bound: float) -> bool:
    """Return whether an error is too large, as one that is not finite. A bound that is not finite proves nothing."""
    return math.isfinite(bound) and not error <= bound


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
