"""A CUDA device for machines without one: torch's fake tensors with the device "cuda", and a CPU tensor behind each.

Every operation runs twice. Fake tensors determine devices, dtypes and shapes by torch's own rules, which reject
operands on two devices; the tensors behind them hold the values. Plain CPU tensors are left alone.

Two things are patched in torch. Autograd needs a driver as soon as C++ sees the device, so a fake tensor shows it to
Python only. And a fake tensor has no values, so `tolist`, `data` and `data_ptr` are those of the tensor behind it.
Streams, kernels, real memory and what CUDA graphs do cannot be tested like this: `tests/gpu` is for that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SOURCES = Path(__file__).resolve().parents[2] / "src"
aten = torch.ops.aten
MEMORY = 1 << 30
"""Bytes of the device's memory."""


class FakeCuda(FakeTensorMode):
    """Work on fake tensors inside the context; tensors made with the device "cuda" are fake.

    Attributes:
        waits: The function of the package that waited for the device, for each value or tensor copied to the host.
        capturing: Whether a CUDA graph is being captured, which makes it an error to wait.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        self.capturing = self._is_working = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the fake tensors and on those behind them."""
        # C++ takes fake tensors to be on the meta device.
        args, kwargs = tree_map(lambda leaf: CUDA if is_on(leaf, "meta") else leaf, (args, kwargs or {}))
        if self._is_working:
            return super().__torch_dispatch__(func, types, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or is_on(leaf, "cuda") for leaf in leaves):
            return func(*args, **kwargs)
        behind_args, behind_kwargs = tree_map(behind, (args, kwargs))
        to_host = func is aten._to_copy.default and is_on(kwargs.get("device"), "cpu")
        if to_host or func in (aten._local_scalar_dense.default, aten.equal.default):
            self.wait()
            return func(*behind_args, **behind_kwargs)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self.wait()
            return func(*behind_args, **behind_kwargs)
        # The tensors behind may lie otherwise in memory, so that what is a view on the device is none of them.
        run = aten.reshape.default if func is aten.view.default else func
        values = run(*behind_args, **behind_kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            # Fake tensors would make a real copy of a constant.
            func, args, kwargs = aten.empty_like.default, (values,), {"device": CUDA}
        self._is_working = True
        try:
            results = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_working = False
        for result, value in zip(tree_leaves(results), tree_leaves(values), strict=True):
            if isinstance(result, FakeTensor):
                assert (result.shape, result.dtype) == (value.shape, value.dtype), func
                result.behind = value
        return results

    def of_values(self, name: str) -> Any:
        """Return a method of fake tensors that serves the package with the tensor behind, and torch with its own."""
        own = getattr(Tensor, name)
        return lambda tensor: own(tensor if self._is_working else tensor.behind)

    def wait(self) -> None:
        """Note that the host waits for the device."""
        assert not self.capturing, "a transfer to the host while a CUDA graph is being captured"
        frame = sys._getframe(1)
        while frame.f_back and not frame.f_code.co_filename.startswith(str(SOURCES)):
            frame = frame.f_back
        self.waits.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")


def is_on(leaf: Any, kind: str) -> bool:
    """Return whether an argument is a device of a kind."""
    return isinstance(leaf, torch.device) and leaf.type == kind


def behind(leaf: Any) -> Any:
    """Return the CPU tensor behind a fake one, and the CPU in place of a device."""
    if isinstance(leaf, FakeTensor):
        return leaf.behind
    return CPU if isinstance(leaf, torch.device) else leaf


def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Replace the parameters and buffers of a module, none of which is shared, as `Module.to` does."""
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            owner._parameters[name] = nn.Parameter(fn(param.detach()), param.requires_grad)
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = fn(buffer)
    return module


def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """Return a copy of a fake tensor; see `copy.deepcopy`."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_param else copied
    return memo[id(tensor)]


def values(tensor: Tensor) -> Tensor:
    """Return the values of a fake tensor, detached."""
    assert isinstance(tensor, FakeTensor)
    return tensor.behind.detach()


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Provide a fake CUDA device with 1 GiB of memory."""
    mode = FakeCuda()
    make, states = Tensor._make_subclass, [torch.zeros(8, dtype=torch.uint8)]

    def make_subclass(cls: Any, elem: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cls is FakeTensor:
            kwargs = {"requires_grad": kwargs["requires_grad"]} if "requires_grad" in kwargs else {}
        return make(cls, elem, *args, **kwargs)

    def tolist(tensor: FakeTensor) -> Any:
        mode.wait()
        return tensor.behind.tolist()

    @contextmanager
    def graph(_: Any) -> Iterator[None]:
        mode.capturing = True
        try:
            yield
        finally:
            mode.capturing = False

    make_tensor, move = torch.tensor, Tensor.to

    def tensor(data: Any, *, device: Any = "cpu", **options: Any) -> Tensor:
        return make_tensor(data, **options).to(device)

    def data_of(tensor: Any) -> Any:
        # Not `detach`, whose result has the same version, so that autograd would notice changes.
        data: Any = torch.empty_like(tensor, requires_grad=False)
        data.behind = tensor.behind.data
        return data

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # C++ would ask the driver for the present card.
        args, kwargs = tree_map(lambda leaf: CUDA if is_on(leaf, "cuda") else leaf, (args, kwargs))
        return move(tensor, *args, **kwargs)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: "Fake card",
        "is_current_stream_capturing": lambda: mode.capturing,
        "get_rng_state_all": lambda: [states[-1].clone()],
        "set_rng_state_all": lambda all_states: states.append(all_states[0].clone()),
        "get_rng_state": lambda device="cuda": states[-1].clone(),
        "set_rng_state": lambda state, device="cuda": states.append(state.clone()),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: MEMORY // 2,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": graph,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "_make_subclass", staticmethod(make_subclass))
        patch.setattr(nn.Module, "_apply", apply)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(Tensor, "to", to)
        patch.setattr(FakeTensor, "tolist", tolist, raising=False)
        data = property(data_of, lambda tensor, other: setattr(tensor, "behind", other.behind))
        patch.setattr(FakeTensor, "data", data, raising=False)
        patch.setattr(FakeTensor, "__deepcopy__", deep_copy)
        for name in ("data_ptr", "untyped_storage"):
            patch.setattr(FakeTensor, name, mode.of_values(name), raising=False)
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        with mode:
            yield mode
