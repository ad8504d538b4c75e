"""What is derived from the modules of a network, kept from step to step while they stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


class Kept(Generic[T]):
    """A value that is derived again once one of the objects that it depends on is another one.

    Objects are compared by identity, which costs next to nothing. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._objects: Sequence[Any] = ()
        self._value: T | None = None

    def get(self, objects: Sequence[Any], derive: Callable[[], T]) -> T:
        """Return the value for these objects, which are held so that none can take the place of another."""
        before, value = self._objects, self._value
        if value is None or len(before) != len(objects) or not all(map(is_, before, objects)):
            value = self._value = derive()
            self._objects = objects
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {"_objects": (), "_value": None}


def structure_of(model: nn.Module) -> list[Any]:
    """Return what identifies the modules of a network, as objects to be compared by identity.

    These are, for each module, itself, its class, its mode and a replaced forward (except that of `model`, which
    engines replace), its submodules, its parameters with dtype, device and whether they require gradients, and the
    names of its buffers. Everything else that a module holds may change without a trace.
    """
    objects: list[Any] = []
    seen: set[nn.Module | None] = {None}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        objects += (module, module.__class__, module.training)
        if module is not model:
            objects.append(module.__dict__.get("forward"))
        for name, param in module._parameters.items():
            objects += (name, param)
            if param is not None:
                objects += (param.requires_grad, param.dtype, param.get_device())
        for name, buffer in module._buffers.items():
            objects += (name, buffer is None)
        if module._modules:
            objects += module._modules.keys()
            objects += module._modules.values()
            waiting += module._modules.values()
    return objects
