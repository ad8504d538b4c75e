"""What the ranks of the tests do besides steps with every option; each function returns what the test looks at."""

from __future__ import annotations

import copy
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from joint_steps import CASES, build, compare, data, flat, optimizer_of, take
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ranks import counted_bytes, step_bytes
from gramgn.models import ResNetFixup
from gramgn.optim import GramGaussNewton, LevenbergMarquardt, Stream
from gramgn.optim.ranks import Exchange, JointLinearisation, Ranks

CONV = next(case for case in CASES if case.name == "convolutions")
PLAIN = CASES[0]


def everything(rank: int) -> dict[str, Any]:
    """Return the result of each check by its name."""
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    checks: list[Callable[..., Any]] = [
        errors,
        not_finite,
        equal_bits,
        single_precision,
        sent_bytes,
        other_layouts,
        wrong_programs,
        copies,
        unlike_ranks,
        groups_of_ranks,
    ]
    return {"compare": compare(rank, alone), **{check.__name__: check(rank, alone) for check in checks}}


def error_of(call: Callable[[], Any]) -> str:
    """Return the kind and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors(rank: int, _: Any) -> dict[str, Any]:
    """Let the closure raise on the last rank, at once and at a trial point, and the solve on rank 0."""
    last = rank == dist.get_world_size() - 1
    model = build(PLAIN)
    optimizer = optimizer_of(PLAIN, model)
    x, y = data(PLAIN, 4, seed=rank)
    before, calls = flat(model), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if last and calls == 1:
            raise KeyError("image 7")
        return model(x) - y

    found = {
        "closure": error_of(lambda: optimizer.step(closure)),
        "moved": not torch.equal(before, flat(model)),
    }
    found["afterwards"] = optimizer.step(closure).status

    def of_value() -> Tensor:
        return torch.tensor(float(b"\xff".decode() if last else 0)) + model(x) - y

    found["kind"] = error_of(lambda: optimizer.step(of_value))

    adaptive = optimizer_of(replace(PLAIN, options={"adaptive_damping": LevenbergMarquardt()}), model)
    before, calls = flat(model), 0

    def at_trial() -> Tensor:
        nonlocal calls
        calls += 1
        if last and calls == 2:
            raise OverflowError("too large")
        return model(x) - y

    found["trial"] = error_of(lambda: adaptive.step(at_trial))
    found["moved"] |= not torch.equal(before, flat(model))

    with replaced(torch.linalg, "cholesky_ex", no_solution):
        found["solve"] = error_of(lambda: optimizer.step(closure))
    if last:
        with replaced(Exchange, "add_factors", no_memory):
            found["exchange"] = error_of(lambda: optimizer.step(closure))
    else:
        found["exchange"] = error_of(lambda: optimizer.step(closure))
    found["settings"] = error_of(lambda: wrong_alpha(optimizer, closure, last))
    found["no samples"] = error_of(lambda: optimizer.step(None))
    found["in the end"] = optimizer.step(closure).status
    return found


def wrong_alpha(optimizer: GramGaussNewton, closure: Callable[[], Tensor], last: bool) -> None:
    before = optimizer.param_groups[0]["alpha"]
    optimizer.param_groups[0]["alpha"] = -1.0 if last else before
    try:
        optimizer.step(closure)
    finally:
        optimizer.param_groups[0]["alpha"] = before


def no_solution(*_: Any) -> None:
    raise torch.linalg.LinAlgError("no eigenvalues")


def no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory for a block")


def not_finite(rank: int, _: Any) -> Any:
    """Let one sample of the last rank be NaN."""
    model = build(CONV)
    optimizer = optimizer_of(CONV, model)
    x, y = data(CONV, 3, seed=rank)
    if rank == dist.get_world_size() - 1:
        y[1] = torch.nan
    before = flat(model)
    info = optimizer.step(lambda: model(x) - y)
    return info.status, torch.equal(before, flat(model)), dict(optimizer.counts)["non_finite"]


def equal_bits(rank: int, _: Any) -> bool:
    """Return whether the ranks agree to the last bit after each of 50 steps."""
    case = replace(
        CONV, options={"adaptive_damping": LevenbergMarquardt(), "momentum": 0.9}, dtype=torch.float32
    )
    model = build(case)
    optimizer = optimizer_of(case, model)
    for step in range(50):
        x, y = data(case, 3 + rank, seed=100 * step + rank)
        optimizer.step(lambda x=x, y=y: model(x) - y)
        own = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, own)
        if len(set(digests)) > 1:
            return False
    return True


def single_precision(rank: int, alone: Any) -> float:
    """Return the error of a step in float32, relative to that of one process."""
    size = dist.get_world_size()
    updates = {}
    for dtype, group_of_ranks in ((torch.float64, alone), (torch.float32, alone), (torch.float32, None)):
        case = replace(CONV, options={"alpha": 0.01}, dtype=dtype)
        model = build(replace(case, dtype=torch.float32)).to(dtype)
        x, y = (tensor.to(dtype) for tensor in data(replace(case, dtype=torch.float32), 8 * size, seed=1))
        here = slice(None) if group_of_ranks is not None else slice(8 * rank, 8 * rank + 8)
        before = flat(model)
        take(case, optimizer_of(case, model, process_group=group_of_ranks), model, x[here], y[here], [8])
        updates[dtype, group_of_ranks is None] = flat(model) - before
    exact = updates[torch.float64, False]
    one, several = ((updates[torch.float32, together_] - exact).norm() for together_ in (False, True))
    return float(several / one)


def sent_bytes(rank: int, _: Any) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step, the mean over ranks, and those of the formula."""
    size, share = dist.get_world_size(), 4
    model = ResNetFixup(8, in_channels=2)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1)
    x, y = torch.randn(share, 2, 24, 24), torch.randn(share)
    for _ in range(2):  # the first step agrees on the plan
        with counted_bytes() as counts:
            optimizer.step(lambda: model(x) - y)
    total = torch.tensor(sum(counts.values()), dtype=torch.float64)
    dist.all_reduce(total)
    m = sum(param.numel() for param in model.parameters())
    return float(total) / size, sum(step_bytes(size, share, m).values())


def other_layouts(rank: int, alone: Any) -> dict[str, str]:
    """Form convolutions in another way on the last rank, from the second step on; return what differs."""

    def adapt(optimizer: GramGaussNewton, step: int) -> None:
        if step and rank == dist.get_world_size() - 1:
            optimizer._engine._memories.conv_paths.policy = "grouped" if step == 1 else "columns"

    return compare(rank, alone, ["convolutions"], even=True, adapt=adapt)


def wrong_programs(rank: int, alone: Any) -> dict[str, bool]:
    """Return which wrong programs the comparison of steps notices."""
    size = dist.get_world_size()
    own_of = JointLinearisation.of
    summed = Ranks.sum_on_first_

    def with_local_b(*args: Any) -> Any:
        joint = own_of(*args)
        return replace(joint, num_samples=-(-joint.num_samples // size))

    def with_mean_of_means(*args: Any) -> Any:
        joint = own_of(*args)
        r = joint.reading.residual.flatten()
        losses = joint.ranks.gather([float(r[joint.own].square().mean().nan_to_num())])
        mean = torch.tensor(sum(loss for (loss,) in losses) / size, dtype=torch.float64)
        return replace(joint, reading=replace(joint.reading, loss=mean))

    def without_relaying(block: Any, *_: Any) -> Tensor:
        return block.rows.transpose(0, 1).flatten(1)

    programs: dict[str, tuple[Any, str, Any]] = {
        "local b": (JointLinearisation, "of", with_local_b),
        "mean of means": (JointLinearisation, "of", with_mean_of_means),
        "R times G": (Ranks, "sum_on_first_", lambda self, tensor: summed(self, tensor).mul_(size)),
        "layouts": (sys.modules[Exchange.__module__], "_relaid", without_relaying),
    }
    noticed = {}
    for name, (owner, attribute, wrong) in programs.items():
        with replaced(owner, attribute, wrong):
            found = (
                other_layouts(rank, alone) if name == "layouts" else compare(rank, alone, ["plain"], steps=1)
            )
        noticed[name] = bool(found)
    return noticed


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def copies(rank: int, _: Any) -> dict[str, bool]:
    """Return whether copies of an optimizer take the same step."""
    case = replace(PLAIN, options={"momentum": 0.9})
    model = build(case)
    optimizer = optimizer_of(case, model)
    x, y = data(case, 3, seed=rank)
    take(case, optimizer, model, x, y, [3])
    pairs = {
        "deepcopy": copy.deepcopy((model, optimizer)),
        "pickle": pickle.loads(pickle.dumps((model, optimizer))),
    }
    fresh = build(case)
    fresh.load_state_dict(model.state_dict())
    loaded = optimizer_of(case, fresh)
    loaded.load_state_dict(optimizer.state_dict())
    pairs["state_dict"] = (fresh, loaded)
    take(case, optimizer, model, x, y, [3])
    same = {}
    for name, (other, of_other) in pairs.items():
        take(case, of_other, other, x, y, [3])
        same[name] = torch.equal(flat(other), flat(model))
    return same


def unlike_ranks(rank: int, _: Any) -> dict[str, str]:
    """Return the errors where the ranks do not fit together."""
    found = {"options": error_of(lambda: optimizer_of(PLAIN, build(PLAIN), momentum=0.1 * rank))}
    model = build(PLAIN)
    optimizer = optimizer_of(PLAIN, model)
    x, y = data(PLAIN, 3, seed=rank)
    if rank:
        with torch.no_grad():
            model[0].bias[0] += 1e-15
    found["values"] = error_of(lambda: optimizer.step(lambda: model(x) - y))
    several = nn.Sequential(nn.Linear(3, 1 + rank))
    found["network"] = error_of(lambda: optimizer_of(PLAIN, several))
    curved = nn.Sequential(nn.Linear(3, 1), nn.Tanh() if rank else nn.ReLU())
    found["modules"] = error_of(lambda: optimizer_of(PLAIN, curved))
    other = build(replace(PLAIN, model=lambda: nn.Linear(3, 2)))
    optimizer = optimizer_of(PLAIN, other)
    narrow = 1 if rank else 2
    found["residuals"] = error_of(lambda: optimizer.step(lambda: other(x)[:, :narrow] - y))
    held = optimizer_of(replace(PLAIN, options={"engine": Stream(memory_budget=4000)}), model)
    found["budget"] = error_of(lambda: held.step(lambda: model(x) - y))
    least = optimizer_of(replace(PLAIN, options={"engine": Stream(memory_budget="least")}), other)
    found["least"] = error_of(lambda: least.step(lambda: other(x)))
    # What is free differs between the ranks.
    with replaced(sys.modules["gramgn.optim.stream.budget"], "free_bytes", lambda _: (rank + 1) * 2**30):
        auto = optimizer_of(replace(PLAIN, options={"engine": Stream(memory_budget="auto")}), model)
    found["auto"] = str(auto._engine.state_dict()["memory_budget"])
    found["wrapped"] = error_of(lambda: optimizer_of(PLAIN, nn.parallel.DistributedDataParallel(model)))
    return found


def groups_of_ranks(rank: int, alone: Any) -> dict[str, Any]:
    """Return what becomes of other groups than the default one."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = build(PLAIN)
    optimizer = optimizer_of(PLAIN, model, process_group=mesh)
    x, y = data(PLAIN, 3, seed=rank)
    found: dict[str, Any] = {"mesh": optimizer.step(lambda: model(x) - y).num_samples}
    single = optimizer_of(PLAIN, model, process_group=alone)
    found["alone"] = single.step(lambda: model(x) - y).num_samples
    square = init_device_mesh("cpu", (size, 1))
    found["square"] = error_of(lambda: optimizer_of(PLAIN, model, process_group=square))
    first = dist.new_group([0])
    found["outside"] = error_of(lambda: optimizer_of(PLAIN, model, process_group=first))
    found["number"] = error_of(lambda: optimizer_of(PLAIN, model, process_group=3))
    return found
