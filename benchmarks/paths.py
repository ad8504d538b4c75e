"""The paths: ways of taking one step on a problem, SGD among them, by their names on the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.packages import (
    BACKPACK_VARIANTS,
    FORMATS,
    LAST,
    Prepared,
    backpack,
    opacus,
    plain_name,
    torch_lm,
)
from benchmarks.problem import ALPHA, LAM, Problem
from gramgn.errors import InputError, nearest
from gramgn.optim import GramGaussNewton, Stream
from gramgn.optim.kernels import OFF, choose

FUSED, FOREACH = "fused", "foreach"
SGD_VARIANTS = (*FORMATS, *(f"{form}, {update}" for form in FORMATS for update in (FUSED, FOREACH)))
PER_SAMPLE = "its per-sample gradients, the update by the formula in float64"
INSTALL = "pip install 'gramgn[bench]'"
SGD_LR = 1e-6
"""Small enough that the weights hardly move while steps are timed."""
MOMENTUM = 0.9
WARM_UP = 3

Build = Callable[[Problem, float, str], Prepared]


@dataclass(frozen=True)
class Path:
    """One way of taking a step.

    Attributes:
        name: The name on the command line and in the CSV file.
        label: The name in the table.
        build: Called with the problem, lr and a variant.
        variants: The forms in which the path can run; the fastest is measured.
        package: The optional package that it needs, as it is imported.
        apart: Whether it is timed after ours, in rounds of its own with SGD: a J of 1.5 GiB disturbs steps of few
            milliseconds.
        cuda: Whether it needs a CUDA device.
        kernels: Which compiled kernels of ours it uses on a CPU, as in the option of `Stream`; None: none in any case.
        remark: A remark below the table.
    """

    name: str
    label: str
    build: Build
    variants: tuple[str, ...] = ("",)
    package: str | None = None
    apart: bool = False
    cuda: bool = False
    kernels: str | None = None
    remark: str = ""

    @property
    def sgd(self) -> bool:
        """Whether this is SGD, which computes another step than the others."""
        return self.name.startswith("sgd")

    def obstacle(self) -> str | None:
        """Return why the path cannot run here, or None if it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: {INSTALL}"
        return None

    def variants_for(self, problem: Problem) -> tuple[str, ...]:
        """Return the variants to choose from; channels last has no meaning for an MLP."""
        return tuple(name for name in self.variants if problem.shape.pixels or LAST not in name)

    def fits(self, problem: Problem) -> bool:
        """Return whether the path has a meaning for this problem on its device, and differs from the others."""
        has_kernels = bool(kernels_form("auto", problem.x.device))
        return (problem.x.device.type == "cuda" or not self.cuda) and (has_kernels or self.kernels != OFF)


def kernels_form(choice: str | None, device: torch.device) -> str:
    """Return the form of our compiled kernels that a choice stands for on a device, empty if there are none."""
    form = choose(choice) if choice and device.type == "cpu" else OFF
    return "" if form == OFF else form


def sgd(problem: Problem, lr: float, variant: str) -> Prepared:
    """Stochastic gradient descent with momentum; `variant` is the memory format and the kind of update."""
    model, x = problem.copied(channels_last=LAST in variant)
    y = problem.y
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=SGD_LR,
        momentum=MOMENTUM,
        fused=True if FUSED in variant else None,
        foreach=True if FOREACH in variant else None,
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(x) - y).square().mean().backward()
        optimizer.step()

    return Prepared(step, model)


def without_kernels(problem: Problem, lr: float, variant: str) -> Prepared:
    """Our optimizer on torch's own operations alone."""
    return ours(problem, lr, variant, Stream(kernels=OFF))


def least_memory(problem: Problem, lr: float, variant: str) -> Prepared:
    """Our streaming engine without a stored J: the update by a second, weighted backward pass."""
    return ours(problem, lr, variant, Stream(memory_budget="least"))


def vmap(problem: Problem, lr: float, variant: str) -> Prepared:
    """`torch.func.vmap` of `grad` over the whole batch: our engine of that name."""
    return ours(problem, lr, variant, "vmap")


def loop(problem: Problem, lr: float, variant: str) -> Prepared:
    """One backward pass per sample: the reference."""
    return ours(problem, lr, variant, "loop")


def ours(problem: Problem, lr: float, variant: str, engine: str | Stream = "stream") -> Prepared:
    """Our optimizer, by default with the streaming engine; `variant` is the memory format."""
    model, x = problem.copied(channels_last=variant == LAST)
    y = problem.y
    optimizer = GramGaussNewton(model, lr=lr, lam=LAM, alpha=ALPHA, damping_convention="mean", engine=engine)

    def closure() -> torch.Tensor:
        residual: torch.Tensor = model(x) - y
        return residual

    return Prepared(lambda: optimizer.step(closure), model)


def captured_sgd(problem: Problem, lr: float, variant: str) -> Prepared:
    """SGD with momentum, its whole step in one graph: forward, backward and update, channels last."""
    prepared = sgd(problem, lr, LAST if problem.shape.pixels else "")
    # Before a capture, workspaces and momentum buffers must exist, made on another stream.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            prepared.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.step()
    return Prepared(graph.replay, prepared.model)


def captured_ours(problem: Problem, lr: float, variant: str) -> Prepared:
    """Our step from captured graphs: forward to Gram in one, update in the other, the solve between them."""
    model, x = problem.copied(channels_last=problem.shape.pixels is not None)
    optimizer = GramGaussNewton(model, lr=lr, lam=LAM, alpha=ALPHA, damping_convention="mean")
    step = optimizer.experimental_capture(lambda x, y: model(x) - y, x, problem.y)
    return Prepared(lambda: step(x, problem.y), model)


PATHS = {
    path.name: path
    for path in (
        Path("sgd", "SGD", sgd, SGD_VARIANTS),
        Path("ours", "ours", ours, FORMATS, kernels="auto"),
        Path("ours-plain", "ours, no kernels", without_kernels, FORMATS, kernels=OFF),
        Path("low-memory", "ours, J not held", least_memory, FORMATS, kernels="auto"),
        Path("vmap", "torch.func vmap(grad)", vmap, FORMATS, apart=True),
        Path("opacus", "Opacus", opacus, FORMATS, "opacus", apart=True, remark=PER_SAMPLE),
        Path("backpack", "BackPACK", backpack, BACKPACK_VARIANTS, "backpack", apart=True, remark=PER_SAMPLE),
        Path(
            "torch-lm",
            "torch-levenberg-marquardt",
            torch_lm,
            FORMATS,
            "torch_levenberg_marquardt",
            apart=True,
            remark="its own step, solved in float32",
        ),
        Path("sgd-graph", "SGD, CUDA graph", captured_sgd, cuda=True),
        Path("ours-graph", "ours, CUDA graphs", captured_ours, cuda=True),
    )
}


OURS = ("ours", "ours-plain")
"""Our optimizer with its default engine: the paths that have targets and are split into parts."""


def choose_paths(names: Iterable[str]) -> list[Path]:
    """Return the paths of these names, preceded by SGD, to which the others are compared.

    Raises:
        InputError: A name is unknown.
    """
    chosen = dict.fromkeys(("sgd", *names))
    for name in chosen:
        if name not in PATHS:
            raise InputError(
                f"there is no path '{name}'{nearest(name, PATHS)}; there are: {', '.join(PATHS)}"
            )
    return [PATHS[name] for name in chosen]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a path's parameters, detached, under their names in the network of the problem."""
    return {plain_name(name): param.detach() for name, param in model.named_parameters()}
