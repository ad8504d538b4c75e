"""Training and evaluation mode, which a network's author may have chosen module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and restore the mode that each module had.

    `model.train()` would not do: it also switches on the dropout and the batch statistics of a part that its author
    froze with `.eval()`.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
