"""What a forward pass can change besides its output: random numbers, buffers and attributes of the modules.

Passes that a user did not ask for, at trial points and in comparisons of J, start from a snapshot and leave none of
their own traces.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.runtime import RandomState, drew_random_numbers, random_state, set_random_state

TABLES = ("_buffers", "_parameters", "_modules")
"""The attributes in which a module keeps what it registers, each a dictionary that a forward can change."""


class Snapshot:
    """The state of a network and of the random number generators of torch, Python and NumPy.

    Attributes are kept as references, tensors that train nothing also by value: a list that a forward appends to keeps
    what was appended.

    Args:
        model: The network.
        device: The device of its parameters.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.random: RandomState = random_state(device)
        self._python = random.getstate()
        self._numpy = _numpy_random().get_state() if _numpy_random() else None
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            attributes = vars(module)
            for table in (attributes, *(attributes[name] for name in TABLES if name in attributes)):
                self._tables.append((table, dict(table)))
                for value in table.values():
                    if _may_change_in_place(value):
                        self._values[id(value)] = (value, value.detach().clone())
        self._not_saved = [
            (module._non_persistent_buffers_set, set(module._non_persistent_buffers_set))
            for module in model.modules()
        ]

    def drew_random_numbers(self) -> bool:
        """Return whether torch, Python or NumPy drew random numbers since then."""
        numpy = _numpy_random()
        now = numpy.get_state() if numpy else None
        same = repr(now) == repr(self._numpy) if now and self._numpy else True
        return drew_random_numbers(self.random, self.device) or random.getstate() != self._python or not same

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put everything back after what is done inside, also where that fails."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Put everything back; it can be done several times."""
        for table, before in self._tables:
            for name in table.keys() - before.keys():
                del table[name]
            for name, value in before.items():
                if name not in table or table[name] is not value:
                    table[name] = value
        for names, kept in self._not_saved:
            names.clear()
            names.update(kept)
        for tensor, content in self._values.values():
            # Without a trace in autograd, whose graph may have saved the tensor.
            tensor.data.copy_(content)
        if self.random:
            set_random_state(self.random, self.device)
        self.restore_python()

    def restore_python(self) -> None:
        """Put the random number generators of Python and NumPy back."""
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)


def _may_change_in_place(value: Any) -> bool:
    """Return whether a module's attribute is a tensor of values that a forward may overwrite; no parameter."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.is_leaf:
        return False
    return value.layout != torch.strided or 0 not in value.stride()


def _numpy_random() -> Any:
    """Return NumPy's random module, or None where nothing has imported it."""
    return getattr(sys.modules.get("numpy"), "random", None)
