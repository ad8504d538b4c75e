"""The arithmetic of blocks: products and sums over rows of J, by the library that is fast on this processor.

torch brings two libraries for float32 on an x86 processor, and only one of them may use its widest vectors: oneDNN
uses AVX-512 wherever there is AVX-512, MKL only on processors of Intel. `preferred_backend` says which one forms the
products here. n rows, b samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gramgn.optim.kernels import Kernels, serves
from gramgn.optim.runtime import float64_home, full_precision_products, product_dtype

BLAS, ONEDNN = "blas", "onednn"
BACKENDS = (BLAS, ONEDNN)

LARGE, MANY_ROWS = 10_000_000, {BLAS: 256, ONEDNN: 128}
"""Number of multiply-adds from which a single product keeps several threads busy, and number of rows from which
computing it by halves pays on a CPU; both timed on two cores."""

LARGE_FOR_KERNELS = 1_500_000
"""Number of multiply-adds from which the compiled kernels form a single product faster than torch does: below, the work
around the call is larger. Timed on one core."""

LONG, PIECE = 2**18, 2**15
"""Rows of more than LONG columns are multiplied in pieces of PIECE columns; longer sums lose digits in float32."""


MOST_PAIRS = 2**24
"""Maximum number of pairs of (sample, place) with (sample, place) that are multiplied at a time, without a budget."""

MOST_LOST = 64.0
"""Ratio of a mean square to a variance up to which the variance may be formed from it."""


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def preferred_backend() -> str:
    """Return `"onednn"` on processors with AVX-512 that are not of Intel, else `"blas"`."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    return ONEDNN if _has_onednn() and " avx512f " in text and "GenuineIntel" not in text else BLAS


@dataclass
class Products:
    """Products and sums over rows of J.

    Attributes:
        kernels: The compiled kernels, or None.
        backend: The library for matrix products on a CPU, one of `BACKENDS`; default: `preferred_backend()`.
        most_pairs: Maximum number of pairs of (sample, place) that are multiplied at a time, which takes memory.
    """

    kernels: Kernels | None = None
    backend: str = field(default_factory=preferred_backend)
    most_pairs: int = MOST_PAIRS

    def gram(self, rows: Tensor) -> Tensor:
        """Return the sum over parts of rows rows^T for rows [parts, n, size], as [n, n] in float64.

        On a CPU, large products are computed part by part and, for many rows, by halves, since the upper triangle
        determines the lower one. Small ones are batched over several pieces of the columns, because a single small
        product gives each thread too little work.
        """
        if self.kernels is not None and serves(rows):
            return self.kernels.gram(rows)
        rows = rows.to(product_dtype(rows.dtype))
        parts, n, size = rows.shape
        with full_precision_products():
            if rows.device.type == "cpu" and n * n * size >= LARGE:
                G = torch.zeros(n, n, dtype=torch.float64)
                for part in rows:
                    self._add_gram_(G, part)
                return G
            if parts == 1:
                pieces = next((pieces for pieces in (4, 3, 2, 5, 7) if size % pieces == 0), 1)
                rows = rows.view(n, pieces, size // pieces).transpose(0, 1)
            products = torch.bmm(rows, rows.transpose(1, 2))
        return products.to(float64_home(products.device)).sum(dim=0, dtype=torch.float64)

    def _add_gram_(self, G: Tensor, rows: Tensor) -> None:
        """Add rows rows^T to G, computing only one of the two off-diagonal blocks if there are many rows."""
        n, size = rows.shape
        backend = self.backend if rows.dtype == torch.float32 and _has_onednn() else BLAS
        if size > LONG:
            for piece in rows.split(PIECE, dim=1):
                self._add_gram_(G, piece)
            return
        if backend == ONEDNN:
            rows = rows.contiguous()
        times_transposed = _by_onednn if backend == ONEDNN else _by_blas
        if n < MANY_ROWS[backend]:
            G += times_transposed(rows, rows)
            return
        first, second = slice(0, n // 2), slice(n // 2, n)
        off_diagonal = times_transposed(rows[first], rows[second])
        G[first, second].add_(off_diagonal)
        G[second, first].add_(off_diagonal.T)
        for half in (first, second):
            self._add_gram_(G[half, half], rows[half])

    def inner_products(self, rows: Tensor) -> Tensor:
        """Return rows rows^T in the dtype of rows [n, size]."""
        if self.is_fast(len(rows) * rows.numel(), rows):
            return self.gram(rows[None]).to(rows.dtype)
        return rows @ rows.T

    def is_fast(self, work: int, *tensors: Tensor) -> bool:
        """Return whether something is faster than torch's own product of these tensors, of `work` multiply-adds."""
        if self.kernels is not None:
            return work >= LARGE_FOR_KERNELS and serves(*tensors)
        if work < LARGE:
            return False
        is_served = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        return self.backend == ONEDNN and is_served and _has_onednn()

    def transposed_times(self, a: Tensor, c: Tensor) -> Tensor:
        """Return a^T c, contiguous, for a [n, size] and c [n, other size]."""
        if not self.is_fast(a.numel() * c.shape[1], a, c):
            return a.T @ c
        if self.kernels is None:
            return _by_onednn(a.T.contiguous(), c.T.contiguous())
        # The gradient of a pointwise convolution's weight for one sample with n places.
        rows = a.new_empty(1, a.shape[1] * c.shape[1])
        x, grad = (t.T.reshape(1, t.shape[1], 1, len(t)) for t in (a, c))
        self.kernels.conv_weight(x, grad, rows, kernel_size=(1, 1))
        return rows.view(a.shape[1], c.shape[1])

    def vector_times_rows(self, u: Tensor, rows: Tensor) -> Tensor:
        """Return u^T rows [parts, size] for u [n] and rows [parts, n, size]."""
        if self.kernels is not None and serves(rows):
            return self.kernels.vector_times_rows(u, rows)
        dtype = product_dtype(rows.dtype)
        u = u.to(rows.device, dtype).expand(len(rows), 1, -1)
        return torch.bmm(u, rows.to(dtype)).squeeze(1)

    def sample_sums(self, d: Tensor) -> Tensor:
        """Return the sum of each sample's entries, [b] for d [b, ...]."""
        if self.kernels is not None and serves(d):
            return self.kernels.row_sums(d)
        return d.sum(dim=tuple(range(1, d.ndim))) if d.ndim > 1 else d

    def channel_sums(self, d: Tensor) -> Tensor:
        """Return the sum over all dimensions but sample and channel, [b, C] for d [b, C, ...]."""
        if self.kernels is not None and d.ndim > 2 and serves(d):
            return self.kernels.channel_sums(d.movedim(1, -1))
        return d.flatten(2).sum(dim=2) if d.ndim > 2 else d

    def channel_dots(self, d: Tensor, x: Tensor) -> Tensor:
        """Return `channel_sums` of d x."""
        if self.kernels is not None and d.ndim > 2 and serves(d, x):
            return self.kernels.channel_dots(d.movedim(1, -1), x.movedim(1, -1))
        return (d.flatten(2) * x.flatten(2)).sum(dim=2) if d.ndim > 2 else d * x

    def group_norm_dots(self, d: Tensor, x: Tensor, num_groups: int, eps: float) -> Tensor | None:
        """Return `channel_dots` of d and x after group normalisation, or None where that takes the normalised x.

        It follows from sums over each channel, as in torch's own derivative, unless their differences lose digits.
        """
        if self.kernels is None or x.ndim < 3 or not serves(d, x):
            return None
        b, size = len(x), x[0, 0].numel() * (x.shape[1] // num_groups)
        first, second = (
            self._by_group(t, num_groups) / size for t in (self.channel_sums(x), self.channel_dots(x, x))
        )
        variance = second - first.square() + eps
        if not bool((second <= MOST_LOST * variance).all()):
            return None
        dots, sums = (
            t.double().view(b, num_groups, -1) for t in (self.channel_dots(d, x), self.channel_sums(d))
        )
        scaled = (dots - first * sums) * variance.rsqrt()
        return scaled.view(b, -1).to(d.dtype)

    @staticmethod
    def _by_group(sums: Tensor, num_groups: int) -> Tensor:
        return sums.double().view(len(sums), num_groups, -1).sum(dim=2, keepdim=True)


def _by_blas(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T."""
    return torch.mm(a, b.T)


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T for contiguous float32 matrices; oneDNN takes thousands of times as long for others."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return product
