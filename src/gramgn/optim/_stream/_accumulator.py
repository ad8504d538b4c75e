"""J and G, put together as the layers' blocks arrive.

b samples, k residuals per sample; rows (sample, residual).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.optim._precision import float64_home, full_precision_products, product_dtype

SMALL = 64
"""Blocks of at most so many columns are multiplied together."""


@dataclass
class Factors:
    """The block of a linear layer as outer products: row (i, j) is D[i, j] A[i]^T, and D[i, j] for the bias.

    Attributes:
        A: Inputs [b, in].
        D: Output gradients [b, k, out].
        weight: The weight's name in the model; None: not trained.
        bias: The bias's name.
    """

    A: Tensor
    D: Tensor
    weight: str | None
    bias: str | None

    def gram(self) -> Tensor:
        """Return (A A^T + 1) o (D D^T) [b k, b k], the 1 for the bias, without forming a block."""
        k = self.D.shape[1]
        A, D = (factor.to(product_dtype(factor.dtype)) for factor in (self.A, self.D.flatten(end_dim=1)))
        of_gradients = _float64(D @ D.T)
        of_inputs = _float64(A @ A.T) if self.weight else of_gradients.new_zeros(1, 1)
        if self.bias:
            of_inputs = of_inputs + 1
        if k > 1 and len(of_inputs) > 1:
            of_inputs = of_inputs.repeat_interleave(k, 0).repeat_interleave(k, 1)
        return of_inputs * of_gradients

    def vjp(self, u: Tensor) -> dict[str, Tensor]:
        """Return D^T diag(u) A and D^T u by name, for u [b, k]."""
        dtype = product_dtype(self.D.dtype)
        D_u = torch.einsum("bk,bko->bo", u.to(dtype), self.D.to(dtype))
        pulled = {}
        if self.weight:
            pulled[self.weight] = D_u.T @ self.A.to(dtype)
        if self.bias:
            pulled[self.bias] = D_u.sum(dim=0)
        return pulled


class Accumulator:
    """Takes per-sample gradients in any order; a parameter's blocks are summed before they are multiplied.

    Args:
        params: The trained parameters by name.
        num_samples: b.
        num_residuals: k.
        expected: How many blocks will come for each parameter in one backward pass.
    """

    def __init__(
        self, params: Mapping[str, Tensor], num_samples: int, num_residuals: int, expected: Mapping[str, int]
    ) -> None:
        self.params = params
        self.b, self.k = num_samples, num_residuals
        self.expected = dict(expected)
        self.blocks: dict[str, Tensor] = {}
        self.orders: dict[str, tuple[int, ...]] = {}
        self.factors: dict[object, Factors] = {}
        self._multiplied: set[str] = set()
        device = next(iter(params.values())).device
        rows = num_samples * num_residuals
        self.G = torch.zeros(rows, rows, dtype=torch.float64, device=float64_home(device))

    def add_block(self, name: str, block: Tensor, j: int) -> None:
        """Add per-sample gradients [b, *shape] of residual j; the last one expected is multiplied at once."""
        held = self.blocks.get(name)
        if held is None and self.k == 1:
            block, self.orders[name] = _in_memory_order(block)
        elif name in self.orders:
            block = block.permute(0, *(d + 1 for d in self.orders[name]))
        block = block.reshape(self.b, -1)
        if self.k == 1:
            # Never in place: a bias's block may be the very gradient that autograd goes on with.
            self.blocks[name] = block if held is None else held + block
        else:
            if held is None:
                held = self.blocks[name] = block.new_zeros(self.b, self.k, block.shape[1])
            held[:, j] += block
        if j == self.k - 1:
            self.expected[name] -= 1
            if self.expected[name] == 0 and block.shape[1] > SMALL:
                self._multiply([name])

    def add_factors(
        self, key: object, A: Tensor, D: Tensor, j: int, weight: str | None, bias: str | None
    ) -> None:
        """Add input [b, in] and output gradient [b, out] of residual j of a linear layer."""
        factors = self.factors.get(key)
        if factors is None:
            several = D[:, None] if self.k == 1 else D.new_zeros(self.b, self.k, D.shape[1])
            factors = self.factors[key] = Factors(A, several, weight, bias)
        if self.k > 1:
            factors.D[:, j] = D

    def finish(self) -> None:
        """Multiply what has not been: factors, small blocks, those of which fewer came than expected."""
        rest = [name for name in self.blocks if name not in self._multiplied]
        small = [name for name in rest if self.params[name].numel() <= SMALL]
        self._multiply(small)
        for name in rest:
            if name not in self._multiplied:
                self._multiply([name])
        with full_precision_products():
            for factors in self.factors.values():
                self.G += factors.gram().to(self.G.device)

    def in_order(self, name: str, flat: Tensor) -> Tensor:
        """Return one row of a block in the shape of its parameter."""
        shape, order = self.params[name].shape, self.orders.get(name)
        if order is None:
            return flat.view(shape)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([shape[d] for d in order]).permute(inverse)

    def _multiply(self, names: list[str]) -> None:
        if not names:
            return
        rows = [self.blocks[name].reshape(self.b * self.k, -1) for name in names]
        block = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        block = block.to(product_dtype(block.dtype))
        with full_precision_products():
            self.G += _float64(block @ block.T)
        self._multiplied.update(names)


@dataclass(frozen=True)
class StreamLinearisation:
    """r, G and J by layer, as blocks or as factors.

    Attributes:
        residual: r, detached.
        num_samples: b.
        eps: The relative precision in which J was formed.
        accumulated: J and G.
    """

    residual: Tensor
    num_samples: int
    eps: float
    accumulated: Accumulator

    def gram(self) -> Tensor:
        """Return G = J J^T [b k, b k] in float64."""
        return self.accumulated.G

    def vjp(self, u: Tensor) -> list[Tensor]:
        """Return J^T u in the parameters' shapes and dtypes; zero for parameters the output does not use."""
        parts = self.accumulated
        pulled: dict[str, Tensor] = {}
        with full_precision_products():
            for factors in parts.factors.values():
                pulled |= factors.vjp(u.to(factors.D.device).view(parts.b, parts.k))
            for name, block in parts.blocks.items():
                dtype = product_dtype(block.dtype)
                rows = block.reshape(parts.b * parts.k, -1).to(dtype)
                pulled[name] = parts.in_order(name, u.to(block.device, dtype) @ rows)
        return [
            pulled[name].to(param.dtype) if name in pulled else torch.zeros_like(param)
            for name, param in parts.params.items()
        ]


def _float64(matrix: Tensor) -> Tensor:
    return matrix.to(float64_home(matrix.device)).to(torch.float64)


def _in_memory_order(block: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a block [b, ...] with its dimensions as they lie in memory, and their order without b's.

    G does not depend on the order of the parameters' entries, so no block is copied for it.
    """
    order = sorted(range(1, block.ndim), key=block.stride, reverse=True)
    return block.permute(0, *order), tuple(d - 1 for d in order)
