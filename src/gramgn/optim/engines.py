"""The engines by name, with the options that belong to each, and the slow oracle among them.

To add an engine: a module with a class that fulfils `gram.Engine`, a frozen dataclass of its options here, and a
line in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramgn.optim.closure import Closure, Forward, Trained, call_closure
from gramgn.optim.gram import BlockLinearisation, Engine
from gramgn.optim.kernels import CHOICES, choose
from gramgn.optim.losses import Loss
from gramgn.optim.runtime import jacobian_eps
from gramgn.optim.settings import check_choice, check_flag, check_keys, check_whole
from gramgn.optim.stream import CONV_PATHS, StreamEngine
from gramgn.optim.verify import Comparison, Verifier
from gramgn.optim.vmap import VmapEngine

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
        """Return an engine with these options."""
        return StreamEngine(
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


ENGINES: dict[str, type[Stream] | type[Vmap] | type[Loop]] = {
    kind.name: kind for kind in (Stream, Vmap, Loop)
}
# The defaults of all options of all engines.
_DEFAULTS = {field.name: field.default for kind in ENGINES.values() for field in fields(kind)}


def engine_options(given: Any) -> Stream | Vmap | Loop:
    """Return the options of an engine.

    A mapping of fields, as a configuration holds it, may have options of other engines at their defaults; without a
    `name` it means `"stream"`.
    """
    if isinstance(given, Stream | Vmap | Loop):
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


def _names(kind: type[Stream] | type[Vmap] | type[Loop]) -> list[str]:
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
        reading, num_samples = call_closure(model, closure, loss, plain_forward)
        tensors = list(trained.params.values())
        rows = reading.differentiated.flatten()
        check = self._verifier.begin(tuple(trained.params), trained.params)
        blocks = [param.new_empty(len(rows), param.numel()) for param in tensors]
        for i, row in enumerate(rows):
            slopes = torch.autograd.grad(
                row, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for block, slope in zip(blocks, slopes, strict=True):
                block[i] = (slope.to_dense() if slope.is_sparse else slope).flatten()
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


def plain_forward(original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Run the model as it is; the batch is the leading dimension of its output."""
    output = original(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
    return output, output.shape[0] if output.ndim else 1
