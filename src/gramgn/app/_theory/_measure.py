"""From a case to the rows of the theory's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import Parts, time_parts
from benchmarks.problem import Shape
from gramgn.figures import Cost, Epoch, Setting, TheoryRun
from gramgn.models import TwoLayer
from gramgn.theory import (
    Path,
    best_learning_rate,
    descent_step,
    follow,
    gauss_newton,
    ggn_step,
    gradient_descent,
    gram,
    limit_kernel,
    linear_residuals,
    spectral_radius,
    split,
)

from ._studies import Case


@dataclass(frozen=True)
class Machine:
    """What stands in every row.

    Attributes:
        device: Name of the processor, with the number of threads.
        torch: Version of PyTorch.
        git: Commit, with ``+`` behind it if there were changes.
    """

    device: str
    torch: str
    git: str


def measure(case: Case, machine: Machine) -> TheoryRun:
    """Train one network and measure the theory's quantities along the way.

    Args:
        case: What to run.
        machine: What stands in every row.
    """
    loaded = case.data.load(0)
    rows = loaded.split == "train"
    x, y = torch.from_numpy(loaded.images[rows]), torch.from_numpy(loaded.targets[rows])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = TwoLayer(case.d, width=case.M, activation=case.activation).double()
    limit = limit_kernel(x, case.activation)
    predicted = _predict(case, model, x, y)
    step = (
        descent_step(model, lr=predicted.lr)
        if predicted.lr is not None
        else ggn_step(model, lam=case.lam, alpha=case.alpha)
    )
    path = follow(
        model,
        x,
        y,
        num_epochs=case.epochs,
        batch_size=case.b,
        order=case.order,
        step=step,
        seed=case.seed,
    )
    lam, alpha = case.damping
    setting = Setting(
        study=case.study,
        method=case.method,
        order=case.order,
        dataset=case.dataset,
        kind=case.data.kind,
        activation=case.activation,
        n=case.n,
        d=case.d,
        M=case.M,
        b=case.batch_size,
        lam=lam,
        alpha=alpha,
        lr=predicted.lr,
        seed=case.seed,
        epochs=case.epochs,
        lambda_0=limit.lambda_0,
        kernel_gap=float(torch.linalg.matrix_norm(path.start.G - limit.K, ord=2)),
        rho=predicted.rho,
        device=machine.device,
        torch=machine.torch,
        git=machine.git,
    )
    return TheoryRun(setting, _epochs(path, predicted.residuals, case))


@dataclass(frozen=True)
class _Prediction:
    """What the linearised network does: contraction an epoch and residual norms; ``None`` in random order."""

    rho: float | None
    residuals: list[float] | None
    lr: float | None = None


def _predict(case: Case, model: TwoLayer, x: Tensor, y: Tensor) -> _Prediction:
    G = gram(model, x)
    with torch.no_grad():
        r = model(x) - y
    if case.method == "gd":
        lr = best_learning_rate(G)
        linear = gradient_descent(G, lr=lr)
        return _Prediction(linear.rho, linear.residuals(r, case.epochs), lr)
    if case.b is None:
        linear = gauss_newton(G, lam=case.lam, alpha=case.alpha)
        return _Prediction(linear.rho, linear.residuals(r, case.epochs))
    if case.order != "cyclic":
        return _Prediction(None, None)
    splitting = split(G, case.b)
    return _Prediction(spectral_radius(splitting), linear_residuals(splitting, r, case.epochs))


def _epochs(path: Path, linear: Sequence[float] | None, case: Case) -> tuple[Epoch, ...]:
    kept = range(0, case.epochs + 1, case.record_every)
    return tuple(
        Epoch(
            epoch=t,
            residual=point.residual,
            linear_residual=None if linear is None else linear[t],
            distance=point.distance,
            drift_J=point.drift_J,
            drift_J_row=point.drift_J_row,
            drift_G=point.drift_G,
        )
        for t, point in enumerate(path.points)
        if t in kept
    )


def measure_costs(shapes: Sequence[Shape], rounds: int, machine: Machine) -> Iterator[Cost]:
    """Time the parts of a step on the real networks.

    Args:
        shapes: ResNets and batches.
        rounds: How often each is timed.
        machine: What stands in every row.
    """
    for found in time_parts(shapes, torch.device("cpu"), rounds):
        yield _cost(found, machine)


def _cost(found: Parts, machine: Machine) -> Cost:
    b, m, parts = found.shape.batch, found.num_params, found.breakdown.parts
    return Cost(
        network=f"{found.shape.network}{found.shape.size}",
        pixels=found.shape.pixels or 0,
        b=b,
        m=m,
        round=found.turn + 1,
        step_s=found.breakdown.step_s,
        forward_s=parts["forward"],
        backward_s=parts["backward"],
        blocks_s=parts["blocks"],
        gram_s=parts["gram"],
        solve_s=parts["solve"],
        update_s=parts["update"],
        sgd_s=found.sgd_s,
        forward_ops=b * found.counts.forward,
        gram_ops=float(b * b * m),
        solve_ops=b**3 / 3,
        device=machine.device,
        torch=machine.torch,
        git=machine.git,
    )
