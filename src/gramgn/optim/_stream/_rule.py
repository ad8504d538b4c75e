"""What a rule is, and the memory it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gramgn.optim._stream._blocks import Blocks
from gramgn.optim._stream._buffers import Buffers
from gramgn.optim._stream._factors import Factors

if TYPE_CHECKING:
    from gramgn.optim._stream._accumulator import Accumulator
    from gramgn.optim._stream._rules_conv import ConvPaths


@dataclass(frozen=True)
class ParameterMemory:
    """Memory for the block of one parameter."""

    buffers: Buffers
    accumulator: Accumulator
    name: str

    def rows(self, parts: int, size: int, like: Tensor) -> Tensor:
        """Return uninitialised memory [parts, b, size] for the block."""
        return self.accumulator.rows(self.name, parts, size, like)


@dataclass(frozen=True)
class RuleMemory:
    """Memory and choices for the blocks of one call of a module.

    Attributes:
        accumulator: Where the blocks will go.
        buffers: Scratch memory.
        conv_paths: How convolutions are treated.
        names: From names within the module to names in the model.
    """

    accumulator: Accumulator
    buffers: Buffers
    conv_paths: ConvPaths
    names: dict[str, str]

    def of(self, local: str) -> ParameterMemory:
        """Return the memory for the block of one of the module's parameters."""
        return ParameterMemory(self.buffers, self.accumulator, self.names[local])


@dataclass(frozen=True)
class Rule:
    """How the per-sample gradients of one module type are computed.

    Attributes:
        blocks: Given the module, its input x [b, ...], the gradient of its output [b, ...], the names of the
            trained parameters and memory to use, returns a block or gradients [b, *shape] for each.
        params: The parameters' names in the module.
        applies: Whether the rule covers this instance.
        factors: Given the module, x, the gradient, the weight's and the bias's name in the model (None: not
            trained), returns the block as outer products; None: this layer has none.
        prefers_factors: Given the module, b, k and the shape of x, whether those are the better choice.
    """

    blocks: Callable[[nn.Module, Tensor, Tensor, frozenset[str], RuleMemory], Blocks]
    params: frozenset[str] = frozenset(("weight", "bias"))
    applies: Callable[[nn.Module], bool] = lambda module: True
    factors: Callable[[nn.Module, Tensor, Tensor, str | None, str | None], Factors] | None = None
    prefers_factors: Callable[[nn.Module, int, int, tuple[int, ...]], bool] = lambda *_: False
