"""Precision, norms, random numbers, memory and profiling: what a step needs of torch and the machine.

The Gram matrix spans many decades and its small end decides the step, so reduced precision (TF32, bfloat16) in
products of J is never silent: it is switched off here. J itself is formed as the user's flags say. Its blocks are
multiplied in float32 (float64 for float64 networks); their products are summed, and the system solved, in float64.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function
from torch.utils import _pytree as pytree

# Relative precision of float32 operations that are carried out in a shorter format.
REDUCED_EPS = {"tf32": 3e-4, "bf16": 3e-3}
MEMORY_SHARE = 4
"""The activations of one chunk may take a fraction 1 / MEMORY_SHARE of the free memory."""

RandomState = dict[str, Tensor]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that a running `torch.profiler` shows as `name`; free of cost while nothing is profiled.

    Args:
        name: `gramgn.forward`, `backward`, `blocks` and `gram` (both inside of backward), `solve` or `update`.
    """
    return record_function(name) if torch.autograd._profiler_enabled() else _NOTHING  # type: ignore[attr-defined]


@cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which blocks of J of this dtype are multiplied: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def float64_home(device: torch.device) -> torch.device:
    """Return where float64 work is done: on `device` itself, for Apple's MPS on the CPU."""
    return torch.device("cpu") if device.type == "mps" else device


def jacobian_eps(
    model: nn.Module, dtype: torch.dtype, device: torch.device, reduced: torch.dtype | None = None
) -> float:
    """Return the relative precision of J: that of its dtype, or of a shorter format that flags let float32 use.

    Args:
        model: The network; convolutions have flags of their own.
        dtype: The dtype of J.
        device: The device on which J is formed.
        reduced: The format of autocast while J was formed; None: no autocast.
    """
    eps = torch.finfo(dtype).eps
    if reduced is not None:
        return max(eps, REDUCED_EPS["bf16"])
    if dtype != torch.float32:
        return eps
    backends: Any = torch.backends
    if device.type == "cuda":
        matmul, conv = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    else:
        matmul, conv = backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
    eps, of_conv = max(eps, REDUCED_EPS.get(matmul, 0.0)), REDUCED_EPS.get(conv, 0.0)
    if of_conv > eps and any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        return of_conv
    return eps


def reduced_precision(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return autocast to `dtype` on `device`, or an empty context for None. Only for forming J, never for G."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def full_precision_products() -> AbstractContextManager[None]:
    """Multiply float32 matrices in float32 inside the context, whatever the flags allow outside of it."""
    backends: Any = torch.backends
    return _ieee(backends.cuda.matmul, backends.mkldnn.matmul)


def full_precision() -> AbstractContextManager[None]:
    """Also convolve, and run recurrent layers, in float32 inside the context."""
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    return _ieee(backends.cuda.matmul, mkldnn.matmul, cudnn.conv, cudnn.rnn, mkldnn.conv, mkldnn.rnn)


@contextmanager
def _ieee(*backends: Any) -> Iterator[None]:
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def attention_by_products() -> AbstractContextManager[None]:
    """Compute attention by matrix products, for which `torch.func.vmap` has rules: it runs fused kernels in a loop."""
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Run transformer layers as in training: torch takes nested tensors where nothing requires gradients."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run_in_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an operation inside of a `TorchDispatchMode`, on ordinary tensors where forward mode holds mere zeros.

    torch (2.14) crashes there when it multiplies such a zero by a number, below second derivatives. Views and
    operations in place get it as it is.
    """
    if not any(each.alias_info for each in func._schema.returns):
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x.new_zeros(x.shape) if x._is_zerotensor() else x, (args, kwargs)
        )
    return func(*args, **(kwargs or {}))


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: nothing may wait for the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def random_state(device: torch.device) -> RandomState:
    """Return the state of torch's random number generators on the CPU and on `device`.

    Empty while a CUDA graph is being captured, where the state cannot be read.
    """
    if is_capturing():
        return {}
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def drew_random_numbers(before: RandomState, device: torch.device) -> bool:
    """Return whether random numbers were drawn since `random_state` returned `before`."""
    now = random_state(device)
    return any(not torch.equal(now[name], state) for name, state in before.items())


def probe_weights(num_rows: int, device: torch.device) -> Tensor:
    """Return weights [num_rows] in [1, 2) that distinguish rows, without drawing random numbers.

    They are multiples of the golden ratio modulo 1, which keep near and far rows apart. In float64 (float32 on MPS).
    """
    dtype = torch.float64 if float64_home(device) == device else torch.float32
    return 1 + (torch.arange(num_rows, dtype=dtype, device=device) * 0.618034) % 1


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Euclidean norm of each tensor; not finite where an entry is not.

    Squares are summed in float32 or better. Where they overflow, the entries are scaled first.
    """
    several = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=_sum_dtype(tensors))).tolist()
    return [
        norm if math.isfinite(norm) else _scaled_norm(tensor)
        for norm, tensor in zip(several, tensors, strict=True)
    ]


def inner_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """Return the inner product of each pair of tensors of one shape, summed in float32 or better."""
    dtype = _sum_dtype(left)
    pairs = zip(left, right, strict=True)
    products = [torch.dot(a.flatten().to(dtype), b.flatten().to(dtype)) for a, b in pairs]
    return torch.stack(products).tolist()


def by_group(values: Sequence[float], groups: Sequence[int], num_groups: int) -> list[list[float]]:
    """Return the values of each group."""
    of_group: list[list[float]] = [[] for _ in range(num_groups)]
    for value, group in zip(values, groups, strict=True):
        of_group[group].append(value)
    return of_group


def _scaled_norm(tensor: Tensor) -> float:
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(tensor / largest, dtype=_sum_dtype([tensor])))


def _sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for other in {tensor.dtype for tensor in tensors}:
        dtype = torch.promote_types(dtype, other)
    return dtype


def samples_that_fit(num_samples: int, model: nn.Module, forward_of_one: Callable[[], Tensor]) -> int:
    """Return the number of samples, from 1 to all, whose activations fit into a quarter of the free memory.

    `forward_of_one` records gradients.
    """
    # Parameters and buffers of the model are in memory anyway.
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward_of_one()
    stored = sum(storages.values())
    return max(1, min(num_samples, free_bytes(output.device) // MEMORY_SHARE // max(1, stored)))


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes that are free on a device; on the CPU no more than its control group leaves."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, *_left_by_groups())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _left_by_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return what each memory limit of this process's control groups (Linux, versions 1 and 2) leaves, in bytes.

    Pages of files that nobody uses are given back before a limit is reached, so they do not count.
    """
    left = [sys.maxsize]
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        second = not controllers
        if not second and "memory" not in controllers.split(","):
            continue
        top = root if second else root / "memory"
        limit, usage, idle = (
            ("memory.max", "memory.current", "inactive_file")
            if second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        folder = top / path.lstrip("/")
        # Inside a container, the path is that of the host, and the container's own group is at the top.
        for each in (folder, *folder.parents):
            if each.is_relative_to(top) and (each / limit).exists():
                most = (each / limit).read_text().strip()
                stat = dict(map(str.split, (each / "memory.stat").read_text().splitlines()))
                used = int((each / usage).read_text()) - int(stat.get(idle, 0))
                left += [max(0, int(most) - used)] if most.isdigit() else []
    return left


class GramMemoryError(torch.OutOfMemoryError):
    """The Gram matrix does not fit.

    Args:
        n: Its number of rows.
        num_groups: The number of parameter groups, each of which has one.
    """

    def __init__(self, n: int, num_groups: int) -> None:
        groups = f" for each of {num_groups} parameter groups" if num_groups > 1 else ""
        super().__init__(
            f"out of memory: the Gram matrix G of {n} rows (one per sample and output) takes {n * n / 2**27:.3g} GiB"
            f"{groups}, and solving with it as much again, whatever the engine. Lower the batch size: half as "
            "many rows take a quarter of that"
        )


def zero_gram(num_groups: int, n: int, device: torch.device) -> Tensor:
    """Return memory for G by parameter group, [groups, n, n] in float64, filled with zeros.

    Raises:
        GramMemoryError: It does not fit.
    """
    home = float64_home(device)
    try:
        # The CPU grants more than there is, and kills the process that uses it.
        if num_groups * n * n >= 2**27 and num_groups * n * n * 8 > free_bytes(home):
            raise GramMemoryError(n, num_groups)
        return torch.zeros(num_groups, n, n, dtype=torch.float64, device=home)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, GramMemoryError) or not is_out_of_memory(error):
            raise
        raise GramMemoryError(n, num_groups) from error


@contextmanager
def explained_out_of_memory(
    params: Mapping[str, Tensor], advice: str, residual: Tensor | None = None
) -> Iterator[None]:
    """Turn running out of memory into an error that names sizes, and what to lower (`advice`)."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, GramMemoryError) or not is_out_of_memory(error):
            raise
        m = sum(param.numel() for param in params.values())
        row_bytes = sum(param.numel() * param.element_size() for param in params.values())
        if residual is None:
            size = f"J takes {row_bytes / 2**20:.4g} MiB per row (one row per sample and output)"
        else:
            rows = residual.numel()
            if 8 * rows * rows > rows * row_bytes:
                raise GramMemoryError(rows, 1) from error
            size = (
                f"J takes about {rows * row_bytes / 2**20:.4g} MiB for {len(residual)} samples ({rows} rows)"
            )
        raise torch.OutOfMemoryError(
            f"out of memory while forming the Jacobian of {m} parameters: {size}, in addition to the activations. "
            f"{advice}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
