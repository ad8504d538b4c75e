"""The engine that uses `torch.func`: a vmapped forward pass gives the outputs and, through its vjp, their J.

Because outputs and Jacobian come from the same forward pass, they share dropout masks and other randomness.
q is the number of outputs per sample, k the number of residuals per sample (k = q in most closures).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from gramgn.optim.closure import (
    Batch,
    Closure,
    Forward,
    OwnForward,
    Trained,
    call_closure,
)
from gramgn.optim.gram import BlockLinearisation, Engine
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.outputs import OTHER_PARAMETERS, NotBySampleError, Outputs, joined, transform_around
from gramgn.optim.runtime import attention_by_products, jacobian_eps
from gramgn.optim.stream.recurrent import states_of_one_sample
from gramgn.optim.trees import Build, flatten, tensors_in
from gramgn.optim.verify import Comparison, Verifier, check_outputs, structure_of, verify

Blocks = dict[str, Tensor]


class VmapEngine(Engine):
    """Forms J with `torch.func.vmap` over samples.

    Args:
        chunk_size: See `Vmap`.
    """

    def __init__(self, chunk_size: int | None = None) -> None:
        self.chunk_size = chunk_size
        self._verifier = Verifier()

    def linearise(
        self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss
    ) -> BlockLinearisation:
        """Call `closure` once and differentiate its residuals; see `Engine`."""
        run = VmapRun(self, model, trained)
        return run.linearised(*call_closure(model, closure, loss, run.forward))

    def verify(
        self,
        model: nn.Module,
        original: Forward,
        params: Mapping[str, Tensor],
        batch: Batch,
        blocks: Mapping[str, Tensor],
    ) -> None:
        """Compare the Jacobian of the outputs with autograd's in some steps; see `Verifier`."""
        check = self._verifier.begin(structure_of(model, batch, params), params)
        if check is None or not check.is_needed(blocks):
            return
        b = batch.size
        q = next(iter(blocks.values())).shape[1]
        # Without chunks in a few parts, so that this J takes less memory than the one that is held.
        step = self.chunk_size or -(-b // 4)

        def plain(comparison: Comparison) -> Tensor:
            args, kwargs = batch.copy().chunk(0, b)
            leaves = [leaf for leaf in tensors_in(original(*args, **kwargs)) if leaf.is_floating_point()]
            if len(leaves) > 1 and any(not leaf.ndim or len(leaf) != b for leaf in leaves):
                raise ValueError(
                    f"the model returns {[list(leaf.shape) for leaf in leaves]} for {b} samples; engine='vmap' needs "
                    "the batch in the leading dimension of all outputs: use engine='stream'"
                )
            output = check_outputs(joined(leaves), model, b)
            comparison.expect(output)
            return output

        def engine(comparison: Comparison) -> Tensor:
            outputs, copied = [], batch.copy()
            for start in range(0, b, step):
                if comparison.state is not None:
                    # One pass starts from one state; what chunks leave behind, the next ones find.
                    comparison.state.restore() if self.chunk_size is None else comparison.state.restore_python()
                samples = range(start, min(start + step, b))
                returned, of_part = _outputs_and_jacobian(model, original, params, copied, step, samples)
                comparison.pull(of_part, start)
                outputs.append(joined([leaf for leaf in tensors_in(returned) if leaf.is_floating_point()]))
            return _joined(outputs)

        verify(check, model, b, plain, engine, k=q)


class VmapRun:
    """One step: the calls of the model, in which J of their outputs is formed, and then that of the residuals."""

    def __init__(self, engine: VmapEngine, model: nn.Module, trained: Trained) -> None:
        self._engine, self._model, self._trained = engine, model, trained
        self._outputs = Outputs(trained, cut=True)
        self._blocks: list[Blocks] = []  # of each output, each block [b, q, size]

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the model on each sample; see `call_closure`."""
        engine, model, params = self._engine, self._model, self._trained.params
        batch = Batch(args, kwargs)
        reason = transform_around(batch.given)
        if reason:
            raise NotBySampleError(reason)
        try:
            returned, blocks = _outputs_and_jacobian(
                model, original, params, batch, engine.chunk_size, range(batch.size)
            )
        except RuntimeError as error:
            _explain_embeddings(model, error)
            _explain_recurrent(error)
            error.add_note("This came from torch.func.vmap over samples; engine='rows' works without it.")
            raise
        engine.verify(model, original, params, batch, blocks)
        before = len(self._outputs.tensors)
        shown = self._outputs.add(returned, batch.size, batch.given)
        sizes = [tensor.numel() // batch.size for tensor in self._outputs.tensors[before:]]
        if sizes:
            parts = {name: block.split(sizes, dim=1) for name, block in blocks.items()}
            self._blocks += [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]
        return shown, batch.size

    def linearised(self, reading: Reading, num_samples: int) -> BlockLinearisation:
        """Chain the derivative of the residuals to the Jacobian of the outputs."""
        slopes, used = self._outputs.slopes(reading)
        k, q = slopes.shape[1:]
        like = self._outputs.tensors[used[0]]
        # Compared once: the host waits for the device.
        is_eye = k == q and bool((slopes == torch.eye(q, dtype=slopes.dtype, device=slopes.device)).all())
        blocks = []
        for name in self._trained.params:
            block = _joined([self._blocks[i].pop(name) for i in used], dim=1)
            blocks.append((block if is_eye else _chain(slopes, block)).flatten(end_dim=1))
        return BlockLinearisation(
            reading=reading.detached(),
            num_samples=num_samples,
            eps=jacobian_eps(self._model, like.dtype, like.device),
            blocks=blocks,
            trained=self._trained,
        )

    def clear(self) -> None:
        """Release J of the outputs."""
        self._blocks = []


def _explain_embeddings(model: nn.Module, error: RuntimeError) -> None:
    """Reject tables that torch.func cannot differentiate, where an error came of them."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.sparse or module.max_norm is not None
        ):
            raise ValueError(
                f"torch.func cannot differentiate {type(module).__name__} at '{path}' with sparse=True or max_norm: "
                "leave them out, or use engine='stream'"
            ) from error


def _explain_recurrent(error: RuntimeError) -> None:
    """Reject uses of recurrent layers that `torch.func` cannot run, where an error came of them."""
    frames = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(name in ("torch.nn.modules.rnn", "torch.nn.utils.rnn") for name in frames):
        raise ValueError(
            f"torch.func could not run a recurrent layer ({str(error).splitlines()[0]}): one sample at a time, it "
            "can neither pack sequences of different lengths nor divide states [layers, b, ...] that the model is "
            "called with; use engine='stream'"
        ) from error


def _outputs_and_jacobian(
    model: nn.Module,
    original: Forward,
    params: Mapping[str, Tensor],
    batch: Batch,
    chunk_size: int | None,
    samples: range,
) -> tuple[Any, Blocks]:
    """Return what the model returns, detached, and the Jacobian of its outputs by parameter, each block [b, q, size].

    Only of the b samples in a range. Outputs are the floating point tensors, one after the other.
    """
    build: list[Build] = []
    others: list[Any] = []
    module = OwnForward(model, original)
    # Everything is detached: the derivatives are taken inside, and an output that still requires a gradient
    # outside of it depends on a parameter that functional_call did not reach.
    present = dict(model.named_parameters())
    if any(present.get(name) is not param for name, param in params.items()):
        raise NotBySampleError(OTHER_PARAMETERS)
    constants = {f"model.{name}": param.detach() for name, param in present.items() if name not in params}
    trained = {name: param.detach() for name, param in params.items()}

    def of_one(*sample: Tensor) -> tuple[list[Tensor], Blocks]:
        args, kwargs = batch.arguments(sample)

        def outputs(trained: Blocks) -> tuple[Tensor, list[Tensor]]:
            state = {**constants, **{f"model.{name}": param for name, param in trained.items()}}
            leaves, make = flatten(functional_call(module, state, args, kwargs))
            build[:] = [make]
            others[:] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            tensors = [_of_one_sample(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            return _flat([tensor for tensor in tensors if tensor.is_floating_point()]), tensors

        flat, pull, tensors = vjp(outputs, trained, has_aux=True)  # type: ignore[misc]
        rows = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
        (blocks,) = vmap(pull)(rows) if len(rows) > 1 else pull(rows[0])
        return tensors, {name: block.reshape(len(flat), -1) for name, block in blocks.items()}

    per_sample = vmap(of_one, randomness="different")
    step = chunk_size or batch.size
    with buffers_kept(model), attention_by_products(), states_of_one_sample(model):
        chunks = [
            per_sample(*batch.part(start, min(start + step, samples.stop)))
            for start in range(samples.start, samples.stop, step)
        ]
    tensors = [_joined(list(parts)) for parts in zip(*(tensors for tensors, _ in chunks), strict=True)]
    for tensor in tensors:
        _check_reached(tensor, model)
    given = iter(tensors)
    returned = build[0]([next(given) if other is None else other for other in others])
    # One block at a time, so that J is held once.
    return returned, {name: _joined([blocks.pop(name) for _, blocks in chunks]) for name in params}


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Reject a forward pass that replaces a buffer: with vmap, the new tensor would belong to one sample."""
    before = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        replaced = []
        for path, module, buffers in before:
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    replaced.append(f"{path}.{name}".removeprefix("."))
                    module._buffers[name] = buffer
    if replaced:
        raise ValueError(
            f"the model's forward assigns the buffers {', '.join(replaced)}: engine='vmap' calls it for each sample "
            "by itself. Change them in place under torch.no_grad after the step, or use engine='stream'"
        )


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _flat(tensors: list[Tensor]) -> Tensor:
    """Return the outputs of one sample as one vector."""
    if not tensors:
        raise ValueError("the model returned no tensor of real numbers")
    return tensors[0].flatten() if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def _of_one_sample(output: Tensor) -> Tensor:
    """Return the output of one sample without its batch dimension, which a model may have squeezed itself."""
    if output.ndim == 0:
        return output
    if output.shape[0] != 1:
        raise ValueError(
            f"the model returned {list(output.shape)} for a batch of one sample; its output must keep the "
            "batch in the leading dimension, [b] or [b, k]"
        )
    return output[0]


def _check_reached(output: Tensor, model: nn.Module) -> None:
    """Reject a model that uses a parameter in another way than through the module that owns it."""
    if not output.requires_grad:
        return
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(output.sum(), params, allow_unused=True)
    unreached = [name for name, grad in zip(names, grads, strict=True) if grad is not None]
    raise ValueError(
        "the model uses tensors that require gradients past its own modules, so they would get no Jacobian: "
        f"{', '.join(unreached) or 'tensors that are no parameters of the model'}. Read parameters as "
        "attributes of the module that owns them in forward, or use engine='rows'"
    )


def _chain(slopes: Tensor, block: Tensor) -> Tensor:
    """Return the rows dr/df df/dw: [b, k, q] times [b, q, size] gives [b, k, size]."""
    return block * slopes if slopes.shape[1:] == (1, 1) else slopes @ block
