"""Rows and Gram matrix of a term with the Laplacian, next to plain `torch.func` code: `python -m benchmarks.terms`.

Points of a network with four hidden layers of width 64 on one thread; CPU seconds, medians of interleaved runs. The
plain code is the fastest of several that were tried: a gradient of the residual by the parameters that is mapped over
all points, the Laplacian by reverse mode over reverse mode, the rows joined, and one product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from gramgn import GramGaussNewton, Term
from gramgn.physics import laplacian

WIDTH, LAYERS, DIMENSION = 64, 4, 2


def network() -> nn.Sequential:
    """Return the network."""
    layers: list[nn.Module] = []
    for number in range(LAYERS):
        layers += [nn.Linear(WIDTH if number else DIMENSION, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def plain(model: nn.Module, x: Tensor) -> Callable[[], tuple[float, Tensor]]:
    """Return the plain code, which gives the seconds of the rows and G."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    basis = torch.eye(DIMENSION)

    def residual(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        def u(x: Tensor) -> Tensor:
            return functional_call(model, params, (x,)).squeeze()

        _, pull = vjp(grad(u), x)  # type: ignore[misc]
        r = vmap(lambda e: (pull(e)[0] * e).sum())(basis).sum() + x.sum()
        return r, r

    def run() -> tuple[float, Tensor]:
        start = time.process_time()
        blocks, _ = vmap(grad(residual, has_aux=True), in_dims=(None, 0))(params, x)
        J = torch.cat([block.reshape(len(x), -1) for block in blocks.values()], dim=1)
        rows = time.process_time() - start
        return rows, (J @ J.T).double()

    return run


def ours(model: nn.Module, x: Tensor) -> Callable[[], tuple[float, Tensor]]:
    """Return what a step does before it solves."""
    optimizer = GramGaussNewton(model, lam=1.0, alpha=1.0)

    def residual(u: Any, x: Tensor) -> Tensor:
        return laplacian(u, x)[0] + x.sum()

    def run() -> tuple[float, Tensor]:
        start = time.process_time()
        trained = optimizer._trained()
        J = optimizer._objective(None, Term(residual, x), trained, optimizer._settings(trained)).linearise()
        rows = time.process_time() - start
        return rows, J.gram()[0]

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split(":")[0])
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, given.dtype))
    torch.manual_seed(0)
    model, x = network(), torch.rand(given.points, DIMENSION)
    runs = {"plain torch.func": plain(model, x), "terms": ours(model, x)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(given.repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            rows, _ = run()
            taken[name].append((time.process_time() - start, rows))
    whole = {}
    for name, times in taken.items():
        # The first run fills caches.
        whole[name], rows = (median(column) for column in zip(*times[1:], strict=True))
        print(
            f"{name:18} {whole[name]:.3f} s, of which rows {rows:.3f} s, Gram matrix {whole[name] - rows:.3f} s"
        )
    print(f"ratio {whole['terms'] / whole['plain torch.func']:.2f}")


if __name__ == "__main__":
    main()
