"""What the ranks of the tests do: steps with every option, next to the same steps in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gramgn.models import ResNetFixup
from gramgn.optim import GramGaussNewton, LevenbergMarquardt, Loop, Rows, StepInfo, Stream, Term, Vmap

NUMBERS = ("loss", "num_samples", "alpha_sum", "step_norm", "predicted_decrease", "trace", "alpha", "lr")
NUMBERS += ("actual_decrease", "rejected")


class Tied(nn.Module):
    """A linear layer that is used twice, parameters of one entry and with gaps, and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(6)[::2])
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0))
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(torch.tanh(self.inner(x * self.mask)))
        return self.outer(torch.tanh(self.scale * inner + self.shift))


class Tokens(nn.Module):
    """A table and an attention layer, which are held as factors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        u = self.table(x)
        return self.out(self.attention(u, u, u, need_weights=False)[0].mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0][:, -1])


class Sometimes(nn.Module):
    """Uses a layer for some samples, and not at all where there are none of these in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 70), nn.Linear(70, 70), nn.Linear(70, 1)

    def forward(self, x: Tensor) -> Tensor:
        u = torch.tanh(self.first(x))
        used = x[:, :1] > 0.5
        return self.out(torch.where(used, torch.tanh(self.second(u)), u) if bool(used.any()) else u)


def mlp(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, outputs))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(8, 12, 1),
        nn.Flatten(),
        nn.Linear(12 * 4 * 4, 1),
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def points(b: int) -> Tensor:
    return torch.randn(b, 3)


def images(b: int) -> Tensor:
    return torch.randn(b, 2, 8, 8)


def tokens(b: int) -> Tensor:
    return torch.randint(40, (b, 5))


def sequences(b: int) -> Tensor:
    return torch.randn(b, 4, 3)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.7, "alpha": 0.5, "weight_decay": 0.02}, {"params": others}]


@dataclass(frozen=True)
class Case:
    """Steps with some options.

    Attributes:
        name: The name of the case.
        options: Those of the optimizer.
        model: Builds the network.
        inputs: Draws the inputs of b samples.
        outputs: The number of outputs per sample.
        grouped: Returns parameter groups.
        terms: Whether the step is on terms.
        dtype: The format of numbers.
        bound: The relative difference of updates that is rounding.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = mlp
    inputs: Callable[[int], Tensor] = points
    outputs: int = 1
    grouped: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    terms: bool = False
    dtype: torch.dtype = torch.float64
    bound: float = 1e-11

    @property
    def crossed(self) -> bool:
        return self.options.get("loss") == "cross_entropy"


LM = {"adaptive_damping": LevenbergMarquardt(), "momentum": 0.9, "weight_decay": 0.01}
CASES = (
    Case("plain"),
    Case("sum", {"damping_convention": "sum"}),
    Case("trace", {"damping_convention": "trace"}),
    Case("momentum", {"momentum": 0.9}),
    Case("weight decay", {"weight_decay": 0.02}),
    Case("decoupled", {"weight_decay": 0.02, "decoupled_weight_decay": True}),
    Case("limited", {"max_step_norm": 0.05}),
    Case("adaptive", {"adaptive_damping": LevenbergMarquardt(), "alpha": 1e-6, "lam": 0.6}),
    Case("adaptive, momentum", LM),
    Case("armijo", {"line_search": "armijo", "lr": 4.0, "alpha": 1e-6}),
    Case("grid", {"line_search": "grid", "lr": 4.0, "momentum": 0.5}),
    Case("warm-up", {"damping_warmup_steps": 3}),
    Case("no damping", {"alpha": 0.0}, bound=1e-7),
    Case("groups", {"momentum": 0.5}, grouped=groups),
    Case("groups, plain", {}, grouped=groups),
    Case("outputs", {}, lambda: mlp(3), outputs=3),
    Case("cross-entropy", {"loss": "cross_entropy"}, lambda: mlp(3), outputs=3),
    Case("cross-entropy, adaptive", {"loss": "cross_entropy", **LM}, lambda: mlp(3), outputs=3),
    Case("tied", {}, Tied),
    Case("frozen", {}, frozen),
    Case(
        "dropout off",
        {},
        lambda: nn.Sequential(nn.Linear(3, 80), nn.Tanh(), nn.Dropout(0.0), nn.Linear(80, 1)),
    ),
    Case("convolutions", {"kernels": "off"}, convolutions, images),
    Case("convolutions, adaptive", {**LM}, convolutions, images),
    Case("convolutions, probe", {"engine": Stream(conv_path="probe")}, convolutions, images),
    Case("resnet", {"momentum": 0.9}, lambda: ResNetFixup(8, in_channels=2), images),
    Case("attention", {}, Tokens, tokens),
    Case("recurrent", {}, Recurrent, sequences),
    Case("sometimes", {}, Sometimes),
    Case("chunks", {"engine": Stream(chunk_size=2)}, convolutions, images),
    Case("chunks, outputs", {"engine": Stream(chunk_size=2), **LM}, lambda: mlp(3), outputs=3),
    # With it, some ranks divide their samples into chunks, and others have so few that they need not.
    Case("budget", {"engine": Stream(memory_budget=200_000), "momentum": 0.9}, convolutions, images),
    Case("low memory", {"engine": Stream(memory_budget="least")}, convolutions, images),
    Case("low memory, momentum", {"engine": Stream(memory_budget="least"), "momentum": 0.9}),
    Case(
        "bfloat16",
        {"engine": Stream(jacobian_dtype="bfloat16")},
        convolutions,
        images,
        dtype=torch.float32,
        bound=2e-2,
    ),
    Case("vmap", {"engine": Vmap()}, lambda: mlp(2), outputs=2),
    Case("loop", {"engine": Loop(), "momentum": 0.9}),
    Case("rows", {"engine": Rows(), "line_search": "armijo"}, lambda: mlp(2), outputs=2),
    Case("terms", {}, terms=True),
    Case("terms, adaptive", {**LM, "damping_convention": "sum"}, terms=True),
    Case("terms, groups", {}, grouped=groups, terms=True),
)


def shares(case: int, size: int, step: int) -> list[int]:
    """Return the number of samples of each rank: uneven, and in some steps one rank has none."""
    several = [3 + (case + rank) % 3 for rank in range(size)]
    if step:
        several[(case + step) % size] = 0
    return several


def optimizer_of(case: Case, model: nn.Module, **more: Any) -> GramGaussNewton:
    options = {"lam": 1.0, "alpha": 0.1, **case.options}
    kernels = options.pop("kernels", None)
    if kernels is not None:
        options["engine"] = Stream(kernels=kernels)
    params = None if case.grouped is None else case.grouped(model)
    return GramGaussNewton(model, params, **options, **more)


def take(
    case: Case, optimizer: GramGaussNewton, model: nn.Module, x: Tensor, y: Tensor, counts: Sequence[int]
) -> StepInfo:
    """Take a step on samples, of which ranks of one process have `counts`."""
    if not len(x):
        return optimizer.step(None)
    if case.terms:

        def first(u: Any, x: Tensor, y: Tensor) -> Tensor:
            return u(x) - y

        def second(u: Any, x: Tensor) -> Tensor:
            return u(x) - u(-x)

        some = torch.cat([part[:2] for part in x.split(list(counts))])
        return optimizer.step(terms=[Term(first, x, y), Term(second, some, weight=0.5)])
    return optimizer.step(lambda: (model(x), y) if case.crossed else model(x).reshape(y.shape) - y)


def build(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = case.model().to(case.dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def data(case: Case, b: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of b samples."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = case.inputs(b)
        x = x.to(case.dtype) if x.is_floating_point() else x
        y = torch.randint(case.outputs, (b,)) if case.crossed else torch.randn(b, case.outputs).to(case.dtype)
    return x, y


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).double()


def unlike(info: StepInfo) -> list[str]:
    """Return what of the statistics of a step differs between ranks."""
    several: list[Any] = [None] * dist.get_world_size()
    own = {name: getattr(info, name) for name in (*NUMBERS, "status", "given_up", "ill_conditioned")}
    own["residual"] = info.residual.tolist()
    own["terms"] = [(term.name, term.loss, term.num_samples, term.residual.tolist()) for term in info.terms]
    dist.all_gather_object(several, repr(own))
    return [] if len(set(several)) == 1 else [f"the ranks report {several}"]


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """Return |given - expected| / |expected|, or |given| where nothing is expected."""
    norm = expected.norm()
    return float((given - expected).norm() / norm if norm > 0 else given.norm())


def differences(case: Case, info: StepInfo, expected: StepInfo, update: Tensor, other: Tensor) -> list[str]:
    """Return what differs between a step of all ranks and one of one process, and between the updates."""
    found = []
    error = relative_difference(update, other)
    if not error <= case.bound:
        found.append(f"update {error:.1e}")
    for name in ("status", "given_up", "rejected", "num_samples"):
        if getattr(info, name) != getattr(expected, name):
            found.append(f"{name} {getattr(info, name)} for {getattr(expected, name)}")
    for name in NUMBERS:
        one, two = float(getattr(info, name)), float(getattr(expected, name))
        if (
            one != two
            and not abs(one - two) <= 100 * case.bound * max(abs(one), abs(two), 1e-3)
            and one == one
        ):
            found.append(f"{name} {one} for {two}")
    if not case.terms:
        if info.residual.shape != expected.residual.shape or info.residual.dtype != expected.residual.dtype:
            found.append(f"residual {list(info.residual.shape)} {info.residual.dtype}")
        if not relative_difference(info.gram, expected.gram) <= max(case.bound, 1e-11):
            found.append("gram")
    for one, two in zip(info.terms, expected.terms, strict=True):
        if not torch.allclose(one.residual, two.residual) or not torch.allclose(one.gram, two.gram):
            found.append(f"term {one.name}")
    return found


def compare(
    rank: int,
    alone: Any,
    names: Sequence[str] | None = None,
    *,
    steps: int = 3,
    even: bool = False,
    adapt: Callable[[GramGaussNewton, int], None] = lambda *_: None,
) -> dict[str, str]:
    """Return what differs between steps of all ranks and of one process, by case.

    Args:
        rank: The number of this rank.
        alone: The group of this rank alone.
        names: The names of the cases; None: all.
        steps: The number of steps.
        even: Whether all ranks have as many samples in all steps.
        adapt: Changes the optimizer of all ranks before each step.
    """
    size = dist.get_world_size()
    wrong = {}
    for number, case in enumerate(CASES):
        if names is not None and case.name not in names:
            continue
        # Each rank starts with other numbers, of which those of rank 0 count.
        own, model = build(case, seed=rank), build(case)
        together = optimizer_of(case, own)
        single = optimizer_of(case, model, process_group=alone)
        found: list[str] = []
        for step in range(steps):
            counts = [3] * size if even else shares(number, size, step)
            x, y = data(case, sum(counts), seed=step)
            here = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
            before, other_before = flat(own), flat(model)
            adapt(together, step)
            info = take(case, together, own, x[here], y[here], [counts[rank]])
            found += unlike(info)
            if rank == 0:
                expected = take(case, single, model, x, y, counts)
                found += differences(case, info, expected, flat(own) - before, flat(model) - other_before)
        if found:
            wrong[case.name] = "; ".join(dict.fromkeys(found))
    return wrong
