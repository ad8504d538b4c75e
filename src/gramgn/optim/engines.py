"""The engines by name, with the options that belong to each, and the slow oracle among them.

To add an engine: a module with a class that fulfils `gram.Engine`, a frozen dataclass of its options here, and a
line in `ENGINES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramgn.optim.choosing import ChoosingEngine
from gramgn.optim.closure import Closure, Forward, Trained, call_closure
from gramgn.optim.gram import BlockLinearisation, Engine
from gramgn.optim.guards import check_modes
from gramgn.optim.kernels import CHOICES, choose
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.runtime import attention_by_products, is_out_of_memory, jacobian_eps
from gramgn.optim.settings import check_choice, check_flag, check_keys, check_whole
from gramgn.optim.stream import CONV_PATHS, StreamEngine
from gramgn.optim.verify import Comparison, Verifier
from gramgn.optim.vmap import VmapEngine

ROWS_AT_A_TIME = 16
"""The number of rows whose backward passes `RowsEngine` batches; each holds the gradients of a whole batch."""

JACOBIAN_DTYPES = (None, "bfloat16", torch.bfloat16)


@dataclass(frozen=True)
class Stream:
    """Form J layer by layer in one backward pass; the default.

    Args:
        chunk_size: The number of samples whose Jacobian is formed at a time, which bounds the activations that are
            held; `"auto"`: as many as fit into a quarter of the memory that is free at the first step; None
            (default): the whole batch. Results agree to rounding.
        conv_path: How the blocks of convolutions are formed: `"static"` (default), by a committed rule;
            `"probe"`, by timing, with the choices kept in `state_dict`; or the name of one way.
        low_memory: Hold no J and form J^T u by a second backward pass; default False. Needs one residual per sample,
            and excludes `chunk_size`.
        jacobian_dtype: None (default), or `"bfloat16"` to form J by autocast; G is not shortened.
        kernels: The compiled kernels, which serve float32 networks on the CPU: `"auto"` (default), what the environment
            variable GRAMGN_KERNELS says, or without it the widest form of vector instructions that this machine and
            installation offer; `"off"`; or a form: `"avx512"`, `"avx2"` or `"portable"`. Part of `state_dict`. Results
            of two forms differ in the last bits.

    Raises:
        ValueError: A value is out of range, `low_memory` and `chunk_size` are combined, or this machine or installation
            lacks the form.
    """

    name: ClassVar[str] = "stream"
    chunk_size: int | str | None = None
    conv_path: str = "static"
    low_memory: bool = False
    jacobian_dtype: str | torch.dtype | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        check_choice("conv_path", self.conv_path, CONV_PATHS)
        check_choice("kernels", self.kernels, CHOICES)
        choose(self.kernels)
        check_flag("low_memory", self.low_memory)
        if self.jacobian_dtype not in JACOBIAN_DTYPES:
            raise ValueError(f"jacobian_dtype must be None or 'bfloat16', got {self.jacobian_dtype!r}")
        if self.chunk_size not in (None, "auto"):
            check_whole("chunk_size", self.chunk_size, least=1, others="None, 'auto' or ")
        if self.low_memory and self.chunk_size is not None:
            raise ValueError(
                "low_memory=True keeps the graph of the whole batch, so chunk_size can bound nothing: set "
                "chunk_size to None (null in a configuration), or low_memory to False"
            )

    def build(self) -> Engine:
        """Return an engine with these options; with the defaults, one that may choose `Vmap`."""
        is_default = self == Stream(kernels=self.kernels)
        return (ChoosingEngine if is_default else StreamEngine)(
            chunk_size=self.chunk_size,
            conv_path=self.conv_path,
            low_memory=self.low_memory,
            jacobian_dtype=torch.bfloat16 if self.jacobian_dtype else None,
            kernels=self.kernels,
        )


@dataclass(frozen=True)
class Vmap:
    """Form J with `torch.func.vmap` over samples.

    Args:
        chunk_size: The number of samples at a time, which bounds the activations that are held; None (default): the
            whole batch.

    Raises:
        ValueError: `chunk_size` is no whole number of at least 1.
    """

    name: ClassVar[str] = "vmap"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            check_whole("chunk_size", self.chunk_size, least=1, others="None or ")

    def build(self) -> Engine:
        """Return an engine with these options."""
        return VmapEngine(self.chunk_size)


@dataclass(frozen=True)
class Loop:
    """Form J by one backward pass per row: slow, for tests and unusual networks."""

    name: ClassVar[str] = "loop"

    def build(self) -> Engine:
        """Return such an engine."""
        return LoopEngine()


@dataclass(frozen=True)
class Rows:
    """Form J by one batched backward pass per row over the whole graph of what the closure did.

    It needs no samples: the closure may call the model several times, with any arguments, and use any part of what it
    returns. Costs about n backward passes for n rows.
    """

    name: ClassVar[str] = "rows"

    def build(self) -> Engine:
        """Return such an engine."""
        return RowsEngine()


Options = Stream | Vmap | Loop | Rows

ENGINES: dict[str, type[Stream] | type[Vmap] | type[Loop] | type[Rows]] = {
    kind.name: kind for kind in (Stream, Vmap, Loop, Rows)
}
# The defaults of all options of all engines.
_DEFAULTS = {field.name: field.default for kind in ENGINES.values() for field in fields(kind)}


def engine_options(given: Any) -> Options:
    """Return the options of an engine.

    A mapping of fields, as a configuration holds it, may have options of other engines at their defaults; without a
    `name` it means `"stream"`.
    """
    if isinstance(given, Options):
        return given
    mapping = given if isinstance(given, Mapping) else {"name": given}
    name = check_choice("engine", mapping.get("name", "stream"), tuple(ENGINES))
    options = {key: value for key, value in mapping.items() if key != "name"}
    check_keys("engine", options, tuple(_DEFAULTS))
    kind = ENGINES[name]
    own = _names(kind)
    for key, value in options.items():
        if key not in own and value != _DEFAULTS[key]:
            having = " and ".join(repr(other) for other, each in ENGINES.items() if key in _names(each))
            raise ValueError(f"{key} is an option of engine {having}; engine {name!r} does not have it")
    return kind(**{key: value for key, value in options.items() if key in own})


def _names(kind: type[Stream] | type[Vmap] | type[Loop] | type[Rows]) -> list[str]:
    return [field.name for field in fields(kind)]


class LoopEngine(Engine):
    """The oracle: forms J row by row from the graph of one ordinary forward pass.

    Slow, and right for everything that autograd differentiates, samples that interact included.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def linearise(
        self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss
    ) -> BlockLinearisation:
        """Call `closure` once and differentiate each of its residuals; see `Engine`."""
        reading, num_samples = self._read(model, closure, loss)
        tensors = list(trained.params.values())
        rows = reading.differentiated.flatten()
        check = self._verifier.begin(tuple(trained.params), trained.params)
        blocks = self._blocks(rows, tensors)
        by_name = {name: block.unsqueeze(1) for name, block in zip(trained.params, blocks, strict=True)}
        if check is not None and check.is_needed(by_name):
            # Finds gradients that are no derivatives.
            comparison = Comparison(
                trained.params, len(rows), 1, jacobian_eps(model, rows.dtype, rows.device)
            )
            with check.recorded() as verified:
                comparison.expect(rows)
                comparison.pull(by_name)
                verified |= comparison.compare()
        if reading.root is not None:
            R = reading.root.mT
            blocks = [(R @ block.view(*R.shape[:2], -1)).flatten(end_dim=1) for block in blocks]
        return BlockLinearisation(
            reading=reading.detached(),
            num_samples=num_samples,
            eps=jacobian_eps(model, tensors[0].dtype, tensors[0].device),
            blocks=blocks,
            trained=trained,
        )

    def _read(self, model: nn.Module, closure: Closure, loss: Loss) -> tuple[Reading, int]:
        """Call the closure and return what was read, and the number of samples."""
        return call_closure(model, closure, loss, plain_forward)

    def _blocks(self, rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """Return J by parameter, one backward pass after the other."""
        blocks = [param.new_empty(len(rows), param.numel()) for param in params]
        for i, row in enumerate(rows):
            slopes = torch.autograd.grad(
                row, params, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for block, slope in zip(blocks, slopes, strict=True):
                block[i] = (slope.to_dense() if slope.is_sparse else slope).flatten()
        return blocks


class RowsEngine(LoopEngine):
    """Batches the backward passes of the loop, and lets the closure do what it wants with the model."""

    def __init__(self) -> None:
        super().__init__()
        self._batched = True

    def _read(self, model: nn.Module, closure: Closure, loss: Loss) -> tuple[Reading, int]:
        """Call the closure as it is; the leading dimension of what it returns counts the samples."""
        check_modes(next(model.parameters()).device)
        with attention_by_products():
            returned = closure()
        first = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
        num_samples = len(first) if isinstance(first, Tensor) and first.ndim else 1
        return loss.read(returned, first, num_samples), num_samples

    def _blocks(self, rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """Return J by parameter, some rows at a time; from the first failure on, one by one."""
        if self._batched:
            try:
                parts = [
                    _batched_gradients(rows, params, start) for start in range(0, len(rows), ROWS_AT_A_TIME)
                ]
                return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._batched = False
                warnings.warn(
                    "GramGaussNewton: engine='rows' cannot batch the backward passes of this network, and takes the "
                    f"rows one by one, as engine='loop' does ({str(error).splitlines()[0]})",
                    RuntimeWarning,
                    stacklevel=6,
                )
        return super()._blocks(rows, params)


def _batched_gradients(rows: Tensor, params: Sequence[Tensor], start: int) -> list[Tensor]:
    """Return the gradients of a range of rows, each [range, size]."""
    stop = min(start + ROWS_AT_A_TIME, len(rows))
    weights = rows.new_zeros(stop - start, len(rows))
    weights[range(stop - start), range(start, stop)] = 1
    slopes = torch.autograd.grad(
        rows, params, weights, retain_graph=True, is_grads_batched=True, allow_unused=True
    )
    return [
        param.new_zeros(stop - start, param.numel()) if slope is None else slope.reshape(stop - start, -1)
        for slope, param in zip(slopes, params, strict=True)
    ]


def plain_forward(original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Run the model as it is; the batch is the leading dimension of its output."""
    output = original(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
    return output, output.shape[0] if output.ndim else 1
