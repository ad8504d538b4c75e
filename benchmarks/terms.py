"""Measure a step on a term with the Laplacian next to the best plain `torch.func` code.

python benchmarks/terms.py                                      # 1,000 points, float64; seconds
python benchmarks/terms.py --points 200 --dtype float32

A network with four hidden layers of width 64 on one thread, in CPU seconds, medians of interleaved runs. The plain code
is the fastest of several: the gradient of the residual by the parameters, mapped over all points at once, the Laplacian
by reverse mode over reverse mode (forward mode over reverse, reverse over forward and forward over forward cost about
the same), rows that are written into one matrix kept between steps, one product, one Cholesky factorisation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call, grad, vjp, vmap  # noqa: E402

from gramgn import GramGaussNewton, Term  # noqa: E402
from gramgn.malloc import keep_freed_blocks  # noqa: E402
from gramgn.physics import laplacian  # noqa: E402
from gramgn.records import processor_name  # noqa: E402

WIDTH, LAYERS, DIMENSION = 64, 4, 2
ALPHA = 1e-3
TARGET = 1.05
"""The greatest ratio of rows and Gram matrix to the plain code's."""
PARTS = ("rows", "Gram matrix", "solve and update")
Step = Callable[[], tuple[float, ...]]
"""Takes a step and returns the CPU seconds of its parts."""


def network() -> nn.Sequential:
    """Return the network."""
    layers: list[nn.Module] = []
    for number in range(LAYERS):
        layers += [nn.Linear(WIDTH if number else DIMENSION, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def source(x: Tensor) -> Tensor:
    """Return the right-hand side at one point."""
    return torch.cos(torch.pi * x).sum()


def plain(model: nn.Module, x: Tensor) -> Step:
    """Return a step of the plain code."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    J = x.new_empty(len(x), sum(param.numel() for param in params.values()))
    basis = torch.eye(DIMENSION)

    def residual(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        def u(x: Tensor) -> Tensor:
            return functional_call(model, params, (x,)).squeeze()

        _, pull = vjp(grad(u), x)  # type: ignore[misc]
        r = vmap(lambda e: (pull(e)[0] * e).sum())(basis).sum() + source(x)
        return r, r

    def step() -> tuple[float, ...]:
        times = [time.process_time()]
        blocks, r = vmap(grad(residual, has_aux=True), in_dims=(None, 0))(params, x)
        torch.cat([block.reshape(len(x), -1) for block in blocks.values()], dim=1, out=J)
        times.append(time.process_time())
        G = (J @ J.T).double()
        times.append(time.process_time())
        G.diagonal().add_(ALPHA * len(x))
        u = torch.cholesky_solve(r.double()[:, None], torch.linalg.cholesky(G))[:, 0].to(J.dtype)
        parts = (J.T @ u).split([param.numel() for param in params.values()])
        for param, part in zip(params.values(), parts, strict=True):
            param.sub_(part.view(param.shape))
        times.append(time.process_time())
        return tuple(b - a for a, b in pairwise(times))

    return step


def ours(model: nn.Module, x: Tensor) -> Step:
    """Return a step of the optimizer, and of its parts."""
    optimizer = GramGaussNewton(model, lam=1.0, alpha=ALPHA)

    def residual(u: Any, x: Tensor) -> Tensor:
        return laplacian(u, x)[0] + source(x)

    term = Term(residual, x)

    def step() -> tuple[float, ...]:
        times = [time.process_time()]
        trained = optimizer._trained()
        J = optimizer._objective(None, term, trained, optimizer._settings(trained)).linearise()
        times.append(time.process_time())
        J.gram()
        times.append(time.process_time())
        optimizer.step(terms=term)
        rows, gram, whole = (b - a for a, b in pairwise([*times, time.process_time()]))
        return rows, gram, whole - rows - gram

    return step


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    keep_freed_blocks()
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, given.dtype))
    torch.manual_seed(0)
    x = torch.rand(given.points, DIMENSION)
    steps = {"plain torch.func": plain(network(), x), "terms": ours(network(), x)}
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
    for _ in range(given.rounds + 2):
        for name, step in steps.items():
            taken[name].append(step())
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}, {given.points} points, {given.dtype}")
    formed = {}
    for name, rounds in taken.items():
        # The first two fill caches and memory.
        seconds = [median(column) for column in zip(*rounds[2:], strict=True)]
        formed[name] = sum(seconds[:2])
        shares = ", ".join(
            f"{part} {s:.3f} s ({s / sum(seconds):.0%})" for part, s in zip(PARTS, seconds, strict=True)
        )
        print(f"{name:16}  {sum(seconds):.3f} s: {shares}")
    ratio = formed["terms"] / formed["plain torch.func"]
    print(f"rows and Gram matrix: {ratio:.2f} of the plain code, at most {TARGET:.2f} wanted")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
