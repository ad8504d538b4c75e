"""What each study runs: full batches over widths, fixed mini-batches over sizes and widths, other methods, costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.problem import Shape
from gramgn.data import Sphere


@dataclass(frozen=True)
class Case:
    """One run of the two-layer network on the sphere.

    Attributes:
        study: Whose run it is.
        M: Width.
        seed: Of data and network.
        epochs: T.
        b: Samples in a batch; ``None``: all, so that an epoch is a step.
        n: Samples.
        d: Features.
        activation: sigma.
        method: ``"ggn"`` or ``"gd"``: gradient descent at the rate that is best on the linearised network.
        order: ``"cyclic"`` or ``"shuffle"``.
        lam: lambda.
        alpha: Beside the sum J J^T.
        record_every: Epochs between rows.
    """

    study: str
    M: int
    seed: int
    epochs: int
    b: int | None = None
    n: int = 100
    d: int = 20
    activation: str = "erf"
    method: str = "ggn"
    order: str = "cyclic"
    lam: float = 1.0
    alpha: float = 0.0
    record_every: int = 1

    @property
    def data(self) -> Sphere:
        """The points."""
        return Sphere(dim=self.d, num_points=self.n, seed=self.seed)

    @property
    def dataset(self) -> str:
        """What stands in a row for the points."""
        return f"{self.data.name}, {self.data.targets} targets"

    @property
    def batch_size(self) -> int:
        """Samples in a batch, also where that is all."""
        return self.n if self.b is None else self.b

    @property
    def damping(self) -> tuple[float, float] | tuple[None, None]:
        """Lambda and alpha, of which gradient descent has none."""
        return (self.lam, self.alpha) if self.method == "ggn" else (None, None)

    @property
    def key(self) -> tuple[object, ...]:
        """What ``Setting.case`` of its row is."""
        data = (self.dataset, self.data.kind, self.activation, self.n, self.d)
        of = (self.study, self.method, self.order, *data, self.M, self.batch_size, *self.damping)
        return (*of, self.seed, self.epochs)


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        seeds: Number of seeds.
        widths: M of the full-batch study.
        cyclic_widths: M of the mini-batch study, at the batch size ``cyclic_b``.
        batches: b of the mini-batch study, at the width ``cyclic_M``.
        cyclic_b: See ``cyclic_widths``.
        cyclic_M: See ``batches``.
        methods_M: M of the comparison of methods.
        descent_epochs: Steps of gradient descent.
        depths: Depths of the ResNets of the cost study, at the largest batch but one.
        cost_batches: b of the cost study, at the depth 32.
        pixels: Of its images; one more shape, of that network and batch, has twice as many.
        rounds: Of its timing.
    """

    seeds: int = 8
    widths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    cyclic_widths: tuple[int, ...] = (128, 512, 2048, 8192)
    batches: tuple[int, ...] = (6, 12, 20, 30)
    cyclic_b: int = 20
    cyclic_M: int = 2048  # noqa: N815 - the paper's symbol
    methods_M: int = 1024  # noqa: N815
    descent_epochs: int = 400
    depths: tuple[int, ...] = (8, 14, 20, 44)
    cost_batches: tuple[int, ...] = (16, 32, 64, 128, 256)
    pixels: int = 32
    rounds: int = 7


FULL = Scale()
SMOKE = Scale(
    seeds=2,
    widths=(64, 128),
    cyclic_widths=(64, 128),
    batches=(20, 30),
    cyclic_M=128,
    methods_M=128,
    descent_epochs=40,
    depths=(14,),
    cost_batches=(4, 8),
    pixels=8,
    rounds=2,
)
"""Seconds: shows only that all works."""

RELAXED = ((2.0, 0.0), (0.75, 0.0), (1.0, 0.1), (1.0, 1.0))
"""(lambda, alpha) of the comparison of methods, beside (1, 0)."""
COST = "cost"
STUDIES = ("quadratic", "cyclic", "methods", COST)


def cases(study: str, scale: Scale) -> Iterator[Case]:
    """Yield the cases of a study but for that of costs, which has shapes.

    Args:
        study: Its name.
        scale: How much.
    """
    for seed in range(scale.seeds):
        if study == "quadratic":
            for M in scale.widths:
                yield Case(study, M, seed, epochs=6)
        elif study == "cyclic":
            yield from _cyclic(seed, scale)
        elif study == "methods":
            yield from _methods(seed, scale)


def shapes(scale: Scale) -> list[Shape]:
    """Return the shapes of the cost study: over b at one depth, over depths, that is m, at one b, and the paper's."""
    middle = scale.cost_batches[-2]
    # The depth 32 is the paper's; the smoke test takes the least there is.
    depth = 32 if scale.pixels > SMOKE.pixels else 8
    over_b = [Shape("resnet", depth, b, scale.pixels) for b in scale.cost_batches]
    over_m = [Shape("resnet", each, middle, scale.pixels) for each in scale.depths]
    return [*over_b, *over_m, Shape("resnet", depth, middle, 2 * scale.pixels)]


def _cyclic(seed: int, scale: Scale) -> Iterator[Case]:
    """Yield cases on 60 points, where rho(A) is below 0.95: the contraction can be told from 1."""
    sizes = [(scale.cyclic_M, b) for b in scale.batches]
    sizes += [(M, scale.cyclic_b) for M in scale.cyclic_widths if scale.cyclic_M != M]
    for M, b in sizes:
        yield Case("cyclic", M, seed, 60, b, n=60, activation="gelu", record_every=3)
    for b in scale.batches:
        yield Case(
            "cyclic", scale.cyclic_M, seed, 60, b, n=60, activation="gelu", order="shuffle", record_every=3
        )


def _methods(seed: int, scale: Scale) -> Iterator[Case]:
    M = scale.methods_M
    yield Case("methods", M, seed, epochs=6)
    yield Case("methods", M, seed, scale.descent_epochs, method="gd", record_every=10)
    for lam, alpha in RELAXED:
        yield Case("methods", M, seed, epochs=20, lam=lam, alpha=alpha)
