"""torch.compile for training steps: asked about before any work, and told in one message where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gramgn.errors import ConfigError, first_line


def check_compiler(device: torch.device) -> None:
    """Compile one small function, so that a machine that cannot is told so before any work.

    Takes 3 s, or about 30 s on a machine whose compiler has cached nothing yet.

    Raises:
        ConfigError: If it does not work: on a CPU for want of a C++ compiler, on CUDA of Triton.
    """
    with told_in_one_message():
        torch.compile(_small, dynamic=False)(torch.ones(8, device=device))


@contextmanager
def told_in_one_message() -> Iterator[None]:
    """Turn whatever torch.compile raises inside into one message.

    Raises:
        ConfigError: In its place.
    """
    # torch has no public name for these errors; importing them is slow, so only where something compiles.
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None) or error
        raise ConfigError(
            f"trainer.compile=true, but torch.compile fails here ({type(inner).__name__}: {first_line(inner)}). "
            "On a CPU it needs a C++ compiler (g++ or clang++ on the path, or CXX=<its path>), on CUDA Triton "
            "and a C compiler; trainer.compile=false does without"
        ) from error


def _small(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
