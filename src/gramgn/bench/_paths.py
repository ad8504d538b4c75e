"""The paths: ways of taking one step on a problem, SGD among them, by their names on the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gramgn.bench._graphs import captured_ours, captured_sgd
from gramgn.bench._networks import plain_name
from gramgn.bench._packages import BACKPACK_VARIANTS, OPACUS_VARIANTS, backpack, opacus, torch_lm
from gramgn.bench._prepared import MOMENTUM, SGD_LR, Prepared
from gramgn.bench._problem import ALPHA, LAM, Problem
from gramgn.errors import InputError, nearest
from gramgn.optim import GramGaussNewton, Stream

CHANNELS_LAST = "channels last"
PER_SAMPLE = "its per-sample gradients, the update by the formula in float64"
INSTALL = "pip install 'gramgn[bench]'"

Build = Callable[[Problem, float, str], Prepared]


@dataclass(frozen=True)
class Path:
    """One way of taking a step.

    Attributes:
        name: On the command line and in the CSV file.
        label: In the table.
        build: Called with the problem, lr and a variant.
        variants: The forms in which the path can run; the fastest is measured.
        package: The optional package that it needs, as it is imported.
        images: It is another memory format of images, so it has no meaning for an MLP.
        cuda: It needs a CUDA device.
        remark: What is to be said of it below the table.
    """

    name: str
    label: str
    build: Build
    variants: tuple[str, ...] = ("",)
    package: str | None = None
    images: bool = False
    cuda: bool = False
    remark: str = ""

    @property
    def sgd(self) -> bool:
        """Whether this is SGD, which computes another step than the rest."""
        return self.name.startswith("sgd")

    @property
    def ours(self) -> bool:
        """Whether this is ours at its default engine, in any format."""
        return self.name.startswith("ours")

    @property
    def graph(self) -> bool:
        """Whether the step is replayed from CUDA graphs."""
        return self.name.endswith("-graph")

    def obstacle(self) -> str | None:
        """Return why the path cannot run here at all, None if it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: {INSTALL}"
        return None

    def variants_for(self, problem: Problem) -> tuple[str, ...]:
        """Return the variants to choose from; they differ in how they treat images."""
        return self.variants if problem.shape.pixels else self.variants[:1]

    def fits(self, problem: Problem) -> bool:
        """Return whether the path has a meaning for this problem on its device."""
        return not (self.images and problem.shape.pixels is None) and not (
            self.cuda and problem.x.device.type != "cuda"
        )


def sgd(problem: Problem, lr: float, variant: str) -> Prepared:
    """Stochastic gradient descent with momentum, torch's own defaults; ``variant`` is the memory format."""
    return _sgd(problem, variant, fused=None)


def sgd_fused(problem: Problem, lr: float, variant: str) -> Prepared:
    """The same with torch's fused update, in channels last."""
    return _sgd(problem, CHANNELS_LAST if problem.shape.pixels else "", fused=True)


def _sgd(problem: Problem, variant: str, fused: bool | None) -> Prepared:
    model, x = problem.copied(channels_last=variant == CHANNELS_LAST)
    y = problem.y
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_LR, momentum=MOMENTUM, fused=fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(x) - y).square().mean().backward()
        optimizer.step()

    return Prepared(step, model)


def ours(problem: Problem, lr: float, variant: str) -> Prepared:
    """Our streaming engine; ``variant`` is the memory format."""
    return _ours(problem, lr, variant, "stream")


def low_memory(problem: Problem, lr: float, variant: str) -> Prepared:
    """Our streaming engine without a stored J: the update by a second, weighted backward pass."""
    return _ours(problem, lr, variant, Stream(low_memory=True))


def vmap(problem: Problem, lr: float, variant: str) -> Prepared:
    """``torch.func.vmap`` of ``grad`` over the whole batch: our engine of that name."""
    return _ours(problem, lr, variant, "vmap")


def loop(problem: Problem, lr: float, variant: str) -> Prepared:
    """One backward pass for each sample: the oracle."""
    return _ours(problem, lr, variant, "loop")


def _ours(problem: Problem, lr: float, variant: str, engine: str | Stream) -> Prepared:
    model, x = problem.copied(channels_last=variant == CHANNELS_LAST)
    y = problem.y
    optimizer = GramGaussNewton(
        model,
        lr=lr,
        lam=LAM,
        alpha=ALPHA,
        damping_convention="mean",
        engine=engine,
    )

    def closure() -> torch.Tensor:
        residual: torch.Tensor = model(x) - y
        return residual

    return Prepared(lambda: optimizer.step(closure), model)


def _last(build: Build) -> Build:
    """Return ``build`` with its memory format set to channels last."""
    return lambda problem, lr, variant: build(problem, lr, CHANNELS_LAST)


PATHS = {
    path.name: path
    for path in (
        Path("sgd", "SGD", sgd),
        Path("sgd-cl", "SGD, channels last", _last(sgd), images=True),
        Path("sgd-fused", "SGD, fused update", sgd_fused),
        Path("ours", "ours", ours),
        Path("ours-cl", "ours, channels last", _last(ours), images=True),
        Path("low-memory", "ours, low_memory", low_memory, ("", CHANNELS_LAST)),
        Path("vmap", "torch.func vmap(grad)", vmap),
        Path("opacus", "Opacus", opacus, OPACUS_VARIANTS, "opacus", remark=PER_SAMPLE),
        Path("backpack", "BackPACK", backpack, BACKPACK_VARIANTS, "backpack", remark=PER_SAMPLE),
        Path(
            "torch-lm",
            "torch-levenberg-marquardt",
            torch_lm,
            package="torch_levenberg_marquardt",
            remark="its own step, solved in float32",
        ),
        Path("sgd-graph", "SGD, CUDA graph", captured_sgd, cuda=True),
        Path("ours-graph", "ours, CUDA graphs", captured_ours, cuda=True),
    )
}
DEFAULT_PATHS = tuple(name for name in PATHS if name != "sgd-fused")


def choose_paths(names: Iterable[str]) -> list[Path]:
    """Return the paths of these names, SGD in both formats first: it is what the others are set against.

    Raises:
        InputError: There is no path of a name.
    """
    chosen = dict.fromkeys(("sgd", "sgd-cl", *names))
    for name in chosen:
        if name not in PATHS:
            raise InputError(
                f"there is no path '{name}'{nearest(name, PATHS)}; there are: {', '.join(PATHS)}"
            )
    return [PATHS[name] for name in chosen]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a path's parameters, detached, by the names they have in the problem's own network."""
    return {plain_name(name): param.detach() for name, param in model.named_parameters()}
