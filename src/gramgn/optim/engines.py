"""The engines by name, with the options that belong to each.

To add an engine: a module with a class that fulfils `gram.Engine`, a frozen dataclass of its options here, and a
line in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from gramgn.optim.gram import Engine
from gramgn.optim.graph import LoopEngine, RowsEngine
from gramgn.optim.kernels import CHOICES, choose
from gramgn.optim.settings import check_choice, check_keys, check_whole
from gramgn.optim.stream import CONV_PATHS, StreamEngine
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
        memory_budget: The number of bytes that a step may add to what is in memory: J, the activations, G and the
            solve. `"auto"`: half of what is available at the first step (on Linux within the limits of the control
            groups; on a GPU what the driver reports); `"least"`: J is never held; None (default): no limit. The
            cheapest way that fits is taken: all of J; J in chunks of samples; J dropped as it is multiplied, with a
            second backward pass for J^T u (one residual per sample); J by groups of parameters, of which the cost is
            reported once. Results agree to rounding.
        jacobian_dtype: None (default), or `"bfloat16"` to form J by autocast; G is not shortened.
        kernels: The compiled kernels, which serve float32 networks on the CPU: `"auto"` (default), what the environment
            variable GRAMGN_KERNELS says, or without it the widest form of vector instructions that this machine and
            installation offer; `"off"`; or a form: `"avx512"`, `"avx2"` or `"portable"`. Part of `state_dict`. Results
            of two forms differ in the last bits.

    Raises:
        ValueError: A value is out of range, or this machine or installation lacks the form.
    """

    name: ClassVar[str] = "stream"
    memory_advice: ClassVar[str] = (
        "Set the engine's memory_budget (bytes, or 'auto': J is formed in parts that fit), lower its chunk_size "
        "(samples at a time, bounds the activations) or lower the batch size (bounds J)"
    )
    chunk_size: int | str | None = None
    conv_path: str = "static"
    memory_budget: int | str | None = None
    jacobian_dtype: str | torch.dtype | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        check_choice("conv_path", self.conv_path, CONV_PATHS)
        check_choice("kernels", self.kernels, CHOICES)
        choose(self.kernels)
        if self.memory_budget not in (None, "auto", "least"):
            others = "None, 'auto', 'least' or, in bytes, "
            check_whole("memory_budget", self.memory_budget, least=1, others=others)
        if self.jacobian_dtype not in JACOBIAN_DTYPES:
            raise ValueError(f"jacobian_dtype must be None or 'bfloat16', got {self.jacobian_dtype!r}")
        if self.chunk_size not in (None, "auto"):
            check_whole("chunk_size", self.chunk_size, least=1, others="None, 'auto' or ")

    def build(self) -> Engine:
        """Return an engine with these options."""
        return StreamEngine(
            chunk_size=self.chunk_size,
            conv_path=self.conv_path,
            memory_budget=self.memory_budget,
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
    memory_advice: ClassVar[str] = (
        "Lower the engine's chunk_size (samples at a time, bounds the activations) or the batch size (bounds J)"
    )
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
    memory_advice: ClassVar[str] = "Lower the batch size, which bounds J and the activations"

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
    memory_advice: ClassVar[str] = Loop.memory_advice

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
    mapping = dict(given) if isinstance(given, Mapping) else {"name": given}
    if mapping.pop("low_memory", False):  # of runs before there was a budget, which can be resumed
        mapping["memory_budget"] = "least"
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
