"""Calling the user's closure with the model's forward replaced, for the length of the call only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gramgn.optim._guards import check_modes
from gramgn.optim._losses import Loss, Reading

Closure = Callable[[], Any]
Forward = Callable[..., Any]


def call_closure(
    model: nn.Module,
    closure: Closure,
    loss: Loss,
    run: Callable[[Forward, tuple[Any, ...], dict[str, Any]], tuple[Tensor, int]],
) -> tuple[Reading, int]:
    """Call ``closure`` with ``model.forward`` replaced by ``run``.

    Args:
        model: The network that the closure calls.
        closure: Returns what ``loss`` reads.
        loss: Reads it.
        run: Given the model's own forward and the arguments of the call, returns the outputs [b, ...] that
            the closure gets to see, and the number of samples b.

    Returns:
        What was read, connected to the outputs by autograd, and b.

    Raises:
        ValueError: The closure called the model not exactly once, or did not return what the loss needs.
    """
    calls: list[tuple[Tensor, int]] = []

    def forward(original: Forward, *args: Any, **kwargs: Any) -> Tensor:
        if calls:
            raise ValueError(
                "the closure called the model twice; it must call it exactly once, on the whole batch"
            )
        check_modes(next(model.parameters()).device)
        output, num_samples = run(original, args, kwargs)
        if num_samples == 0:
            raise ValueError("the model must be called with a tensor that holds at least one sample [b, ...]")
        calls.append((output, num_samples))
        return output

    with _replaced_forward(model, forward):
        returned = closure()
    if not calls:
        raise ValueError(
            "the closure did not call the model; it must call model(...), the very module that was given to "
            "the optimizer, exactly once (not a part of it, a copy, or another method)"
        )
    (output, num_samples) = calls[0]
    return loss.read(returned, output, num_samples), num_samples


@contextmanager
def _replaced_forward(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Let ``model(...)`` call ``forward`` with the model's own forward as first argument."""
    own = vars(model).get("forward")
    original = model.forward
    model.forward = lambda *args, **kwargs: forward(original, *args, **kwargs)
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
