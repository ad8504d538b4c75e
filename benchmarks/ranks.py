"""Measure a step that R processes on this machine take together, next to the step of one process.

python benchmarks/ranks.py                                        # minutes, on an idle machine
python benchmarks/ranks.py --smoke                                # tiny shapes, seconds
python benchmarks/ranks.py --ranks 3 --shapes resnet:96x32        # other numbers
python benchmarks/ranks.py --table                                # only the bytes by formula

Each rank has one thread. CPU seconds are those of all ranks together, waiting and gloo's threads included; one-process
steps are taken by rank 0 between them, while the others sleep. "Apart" is what it costs that all ranks step at the same
time, each alone on its share, with nothing exchanged; what "together" costs beyond that is the exchange. SGD goes
through DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.problem import ALPHA, LAM, Shape, make_problem  # noqa: E402
from gramgn.malloc import keep_freed_blocks  # noqa: E402
from gramgn.optim import GramGaussNewton, Stream  # noqa: E402
from gramgn.optim.kernels import OFF  # noqa: E402

SHAPES, SMOKE_SHAPES = ("resnet:128x32", "resnet:128x64"), ("resnet8:12x8",)
LR = 2.0**-10
NETWORKS = {"ResNet-32": 461_086, "ResNet-18": 11_689_512, "ResNet-50": 25_557_032}
"""Parameters of the networks in the table."""
FORWARD = {
    "ResNet-32, 32x32": ("ResNet-32", 68.9e6),
    "ResNet-32, 64x64": ("ResNet-32", 275.4e6),
    "ResNet-18, 224x224": ("ResNet-18", 1.814e9),
    "ResNet-50, 224x224": ("ResNet-50", 4.089e9),
}
"""Multiplications of one sample's forward pass, counted by torch's FlopCounterMode."""
SIZES, SHARES = (2, 4, 8, 16, 32, 64), (16, 64)
"""Numbers of ranks, and samples of each, in the table."""
BATCHES = (128, 512, 2_048)
LINKS = {"NVLink of H100s, 450 GB/s": (8, 450e9), "a network of 200 Gb/s": (64, 25e9)}
"""Numbers of ranks and bytes per second and rank of the modelled exchange."""
MB = 1e6


def step_bytes(size: int, share: float, m: int, itemsize: int = 4, k: int = 1) -> dict[str, float]:
    """Return what a rank sends in one step, by what it is for; the mean over ranks.

    Args:
        size: The number of ranks R.
        share: The number of samples of a rank b_r, the mean over ranks.
        m: The number of parameters.
        itemsize: The bytes e of a number.
        k: The number of residuals per sample.
    """
    others, n = (size - 1) / size, size * share * k
    return {
        "rows": others * share * k * m * itemsize,
        "update": others * 2 * m * itemsize,
        "G": others * n * n / 2 * 8,
    }


@contextmanager
def counted_bytes() -> Iterator[dict[str, float]]:
    """Count what a rank sends through the collectives inside, by their names.

    An all-reduce moves 2 (R-1)/R of its bytes per rank, a reduction or broadcast (R-1)/R, as the mean over ranks.
    """
    counts: dict[str, float] = {}
    modules = (dist, dist.distributed_c10d)

    def sent(name: str, args: Sequence[Any], group: Any) -> float:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if name == "all_to_all_single":
            return (sum(args[3]) - args[3][rank]) * args[1].element_size()
        tensor = args[1] if name == "all_gather" else args[0]
        factor = {"all_gather": size - 1, "all_reduce": 2 * (size - 1) / size}
        return factor.get(name, (size - 1) / size) * tensor.numel() * tensor.element_size()

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0.0) + sent(name, args, kwargs.get("group"))
            return own(*args, **kwargs)

        return call

    names = ("all_to_all_single", "all_gather", "all_reduce", "reduce", "broadcast")
    before = [(module, name, getattr(module, name)) for module in modules for name in names]
    try:
        for module, name, own in before:
            setattr(module, name, counting(name, own))
        yield counts
    finally:
        for module, name, own in before:
            setattr(module, name, own)


@dataclass(frozen=True)
class Measured:
    """Medians over rounds; seconds of one step."""

    shape: str
    path: str
    alone_cpu_s: float
    apart_cpu_s: float  # of all ranks
    together_cpu_s: float  # of all ranks
    alone_s: float
    together_s: float
    sent: float | None  # bytes of a rank, the mean
    expected: float | None


def run_rank(rank: int, size: int, store: str, texts: Sequence[str], rounds: int, out: Any) -> None:
    """Measure on one rank; rank 0 puts a list of `Measured` into a queue."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    keep_freed_blocks()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=600)
    )
    alone = [dist.new_group([each]) for each in range(size)][rank]
    found = []
    for text in texts:
        shape = Shape.parse(text)
        for path in ("kernels", "without kernels", "SGD"):
            found.append(_measured(rank, size, shape, path, rounds, alone))
    if rank == 0:
        out.put(found)
    dist.barrier()
    os._exit(0)


def _measured(rank: int, size: int, shape: Shape, path: str, rounds: int, alone: Any) -> Measured:
    problem = make_problem(shape, torch.device("cpu"))
    x, y = problem.x.chunk(size)[rank], problem.y.chunk(size)[rank]
    steps: list[Callable[[], object]] = []
    for group, own_x, own_y in ((alone, problem.x, problem.y), (alone, x, y), (None, x, y)):
        model, _ = problem.copied(channels_last=path != "without kernels")
        own_x = own_x.contiguous(memory_format=torch.channels_last) if path != "without kernels" else own_x
        steps.append(_stepper(model, own_x, own_y, path, group))
    one, apart, several = steps
    times: list[list[float]] = []
    for turn in range(rounds + 2):  # the first two learn the plan and compare J with autograd
        seconds = _seconds(one if rank == 0 else _nothing)
        dist.barrier()
        seconds += _seconds(apart)
        dist.barrier()
        with counted_bytes() as counts:
            seconds += _seconds(several)
        dist.barrier()
        if turn > 1:
            times.append(seconds)
    one_cpu, one_s, apart_cpu, _, several_cpu, several_s = map(torch.tensor, zip(*times, strict=True))
    sent = torch.tensor(sum(counts.values()))
    for of_all_ranks in (apart_cpu, several_cpu, sent):
        dist.all_reduce(of_all_ranks)
    is_sgd = path == "SGD"
    expected = sum(step_bytes(size, shape.batch / size, problem.num_params).values())
    return Measured(
        shape=shape.text,
        path=path,
        alone_cpu_s=float(one_cpu.median()),
        apart_cpu_s=float(apart_cpu.median()),
        together_cpu_s=float(several_cpu.median()),
        alone_s=float(one_s.median()),
        together_s=float(several_s.median()),
        sent=None if is_sgd else float(sent) / size,
        expected=None if is_sgd else expected,
    )


def _stepper(model: nn.Module, x: Tensor, y: Tensor, path: str, group: Any) -> Callable[[], object]:
    if path != "SGD":
        engine = Stream(kernels=OFF) if path == "without kernels" else Stream()
        optimizer = GramGaussNewton(model, lr=LR, lam=LAM, alpha=ALPHA, engine=engine, process_group=group)
        return lambda: optimizer.step(lambda: model(x) - y)
    wrapped = model if group is not None else nn.parallel.DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        sgd.zero_grad()
        (wrapped(x) - y).square().mean().backward()
        sgd.step()

    return step


def _nothing() -> None:
    return


def _seconds(step: Callable[[], object]) -> list[float]:
    """Return the CPU and wall-clock seconds of a step."""
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return [time.process_time() - cpu, time.perf_counter() - wall]


def measure(size: int, texts: Sequence[str], rounds: int) -> list[Measured]:
    """Start the ranks and return what they measured."""
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=run_rank, args=(rank, size, store, texts, rounds, out), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        while out.empty():
            if any(process.exitcode for process in ranks):
                raise SystemExit("a rank has failed; see above")
            time.sleep(0.1)
        found = out.get()
        for process in ranks:
            process.join()
    measured: list[Measured] = found
    return measured


def print_measured(found: Sequence[Measured], size: int) -> None:
    """Print what was measured."""
    print(
        f"{size} ranks, one thread each; milliseconds per step, apart, together: in multiples of 1 process\n"
    )
    print(
        "| shape | path | CPU: 1 process | apart | together | wall: 1 process | together | faster | MB | formula |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in found:
        apart, together = each.apart_cpu_s / each.alone_cpu_s, each.together_cpu_s / each.alone_cpu_s
        sent = "- | -" if each.sent is None else f"{each.sent / MB:.3f} | {(each.expected or 0) / MB:.3f}"
        print(
            f"| {each.shape} | {each.path} | {1e3 * each.alone_cpu_s:.0f} | {apart:.2f} | {together:.2f} | "
            f"{1e3 * each.alone_s:.0f} | {1e3 * each.together_s:.0f} | {each.alone_s / each.together_s:.2f} | {sent} |"
        )


def print_formula() -> None:
    """Print the bytes of a step by formula."""
    print(
        "\nMB that a rank sends per step in float32, by the formula (R-1)/R (b_r m e + 2 m e + 4 (R b_r)^2)\n"
    )
    print(
        "| network | samples per rank |"
        + "".join(f" R = {size} |" for size in SIZES)
        + " SGD (DDP), R = 64 |"
    )
    print("|---|---|" + "---|" * (len(SIZES) + 1))
    for name, m in NETWORKS.items():
        for share in SHARES:
            totals = [sum(step_bytes(size, share, m).values()) / MB for size in SIZES]
            ddp = step_bytes(SIZES[-1], share, m)["update"] / MB
            cells = "".join(f" {total:,.0f} |" for total in totals)
            print(f"| {name}, {m / 1e6:.2f} million | {share} |{cells} {ddp:,.0f} |")
    print("\nMODELLED, not measured: milliseconds of that at the rate of a link, none of it hidden\n")
    print("| network | samples per rank |" + "".join(f" R = {R}, {link} |" for link, (R, _) in LINKS.items()))
    print("|---|---|" + "---|" * len(LINKS))
    for name, m in NETWORKS.items():
        for share in SHARES:
            times = [1e3 * sum(step_bytes(R, share, m).values()) / rate for R, rate in LINKS.values()]
            print(f"| {name} | {share} |" + "".join(f" {time:.3g} |" for time in times))
    print(
        "\nOperations of the products in G over those of SGD, b m / (6 x multiplications), for b samples in all\n"
    )
    print("| network |" + "".join(f" b = {b:,} |" for b in BATCHES) + " equal at b |")
    print("|---|" + "---|" * (len(BATCHES) + 1))
    for name, (network, multiplications) in FORWARD.items():
        per_sample = NETWORKS[network] / (6 * multiplications)
        print(
            f"| {name} |" + "".join(f" {b * per_sample:.2f} |" for b in BATCHES) + f" {1 / per_sample:,.0f} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of processes; default 2")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind that count; default 7")
    parser.add_argument("--shapes", nargs="+", help=f"as for benchmarks/step.py; default {' '.join(SHAPES)}")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--table", action="store_true", help="print only the bytes by formula")
    given = parser.parse_args(arguments)
    if not given.table:
        texts = given.shapes or (SMOKE_SHAPES if given.smoke else SHAPES)
        print_measured(measure(given.ranks, texts, 2 if given.smoke else given.rounds), given.ranks)
    print_formula()


if __name__ == "__main__":
    main()
