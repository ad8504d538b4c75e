"""Error against seconds of Gram-Gauss-Newton, Adam and L-BFGS on problems of physics.

    python examples/physics/compare.py poisson_2d                    # two minutes per optimizer and seed: --seconds
    python examples/physics/compare.py heat --seconds 20 --seeds 1 --optimizers ggn adam

Everything is in float64. Evaluation and drawing do not count as seconds. Writes a picture and a CSV file into --out.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from deeponet import deeponet
from heat import coefficient, heat
from lennard_jones import lennard_jones
from poisson import poisson
from problem import Problem
from torch import Tensor, nn
from torch.func import vmap

from gramgn import GramGaussNewton, Term
from gramgn.optim import OneSample

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "poisson_2d": lambda: poisson(2, 400, 100),
    "poisson_5d": lambda: poisson(5, 800, 400),
    "heat": heat,
    "coefficient": coefficient,
    "deeponet": deeponet,
    "lennard_jones": lennard_jones,
}
Curve = list[tuple[float, int, float]]
"""Seconds, steps and error."""


def loss_of(model: nn.Module, terms: Sequence[Term]) -> Tensor:
    """Return the loss of terms as first-order methods differentiate it."""
    u, loss = OneSample(model), torch.zeros(())
    for term in terms:
        r = vmap(partial(term.function, u))(*term.samples)
        loss = loss + term.weight * r.square().mean()
    return loss


def ggn(model: nn.Module, problem: Problem, share: Callable[[], float]) -> Iterator[None]:
    """Take steps of Gram-Gauss-Newton."""
    given = {"lam": 1.0, "momentum": 0.9, "line_search": "grid", **problem.ggn}
    optimizer = GramGaussNewton(model, **given)
    while True:
        optimizer.step(terms=problem.draw())
        yield


def adam(model: nn.Module, problem: Problem, share: Callable[[], float], *, lr: float) -> Iterator[None]:
    """Take steps of Adam, whose step size falls to 0 as a cosine over the seconds."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    while True:
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * share())) / 2
        optimizer.zero_grad()
        loss_of(model, problem.draw()).backward()
        optimizer.step()
        yield


def lbfgs(model: nn.Module, problem: Problem, share: Callable[[], float], *, redraw: int) -> Iterator[None]:
    """Take 20 steps of L-BFGS at a time, on points that are drawn again after `redraw` steps, with a new history."""
    while True:
        terms = problem.draw()
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            max_iter=20,
            history_size=50,
            line_search_fn="strong_wolfe",
            tolerance_grad=0.0,
            tolerance_change=0.0,
        )

        def closure(optimizer: torch.optim.Optimizer = optimizer, terms: Sequence[Term] = terms) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, terms)
            loss.backward()
            return loss

        for _ in range(redraw // 20):
            optimizer.step(closure)  # type: ignore[arg-type]
            yield


Take = Callable[[nn.Module, Problem, Callable[[], float]], Iterator[None]]
OPTIMIZERS: dict[str, dict[str, Take]] = {
    "ggn": {"": ggn},
    "adam": {f"lr {lr:g}": partial(adam, lr=lr) for lr in (1e-2, 3e-3, 1e-3)},
    "lbfgs": {f"points for {number} steps": partial(lbfgs, redraw=number) for number in (200, 1000)},
}
"""By name, the settings among which the best by its median error is reported."""


def trained(problem: Problem, take: Take, seconds: float, seed: int) -> tuple[nn.Module, Curve]:
    """Train for some seconds; return the network and its curve."""
    torch.manual_seed(seed)
    model, spent, steps, due = problem.model(), 0.0, 0, 0.0
    curve = [(0.0, 0, problem.error(model))]
    several = take(model, problem, lambda: min(1.0, spent / seconds))
    while spent < seconds:
        begun = time.perf_counter()
        next(several)
        spent += time.perf_counter() - begun
        steps += 1
        if spent >= due or spent >= seconds:
            curve.append((spent, steps, problem.error(model)))
            due = spent * 1.1
    return model, curve


def compare(
    name: str, seconds: float, seeds: int, optimizers: Sequence[str], out: Path | None
) -> dict[str, float]:
    """Train with each optimizer; print, write and return the median errors of the best settings."""
    problem, medians = PROBLEMS[name](), {}
    curves: dict[str, list[Curve]] = {}
    drawn: nn.Module | None = None
    for optimizer in optimizers:
        tried = {}
        for setting, take in OPTIMIZERS[optimizer].items():
            runs = [trained(problem, take, seconds, seed) for seed in range(seeds)]
            error = median(curve[-1][2] for _, curve in runs)
            tried[error] = [curve for _, curve in runs]
            drawn = runs[0][0] if optimizer == "ggn" or drawn is None else drawn
            print(
                f"{name}: {optimizer} {setting}: relative error {error:.2e} after {seconds:g} s, "
                f"{runs[0][1][-1][1]} steps; seeds: {', '.join(f'{c[-1][2]:.1e}' for _, c in runs)}",
                flush=True,
            )
        medians[optimizer] = min(tried)
        curves[optimizer] = tried[min(tried)]
    if out is not None and drawn is not None:
        write(out, name, problem, curves, drawn)
    return medians


def write(out: Path, name: str, problem: Problem, curves: dict[str, list[Curve]], model: nn.Module) -> None:
    """Write the curves as a CSV file, and a picture of them next to one of the solution."""
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["optimizer", "seed", "seconds", "steps", "error"])
        for optimizer, several in curves.items():
            for seed, curve in enumerate(several):
                rows.writerows([optimizer, seed, f"{s:.3f}", n, f"{e:.4e}"] for s, n, e in curve)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (optimizer, several) in enumerate(curves.items()):
        for seed, curve in enumerate(several):
            left.plot(
                [s for s, _, _ in curve], [e for _, _, e in curve],
                color=f"C{number}", label=optimizer if seed == 0 else None,
            )  # fmt: skip
    left.set(yscale="log", xlabel="seconds", ylabel="relative error", title=problem.title)
    left.legend()
    problem.plot(model, right)
    figure.savefig(out / f"{name}.png", dpi=110)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("problems", nargs="+", choices=[*PROBLEMS, "all"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, per optimizer and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--out", type=Path, default=Path("outputs/physics"))
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    for name in PROBLEMS if "all" in given.problems else given.problems:
        compare(name, given.seconds, given.seeds, given.optimizers, given.out)


if __name__ == "__main__":
    main()
