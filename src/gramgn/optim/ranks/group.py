"""The ranks that take one step together: the few collectives that it needs, and errors that are raised on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gramgn.optim.solve import SolveError

KINDS = ValueError, SolveError, RuntimeError
"""What an error is on the other ranks: the first that it is an instance of, else the last."""


class Ranks:
    """The ranks of a process group, of which there are at least two.

    A deep copy of an optimizer stays in the group. A pickle holds none: what is loaded is in the default group.

    Args:
        group: The process group.
        device: The device of the network.

    Attributes:
        rank: The number of this process in the group.
        size: The number of ranks R.
        device: Where tensors are exchanged.
        plans: What is exchanged in which order, by an identity that all ranks share; see `exchange`.
        seen: The identity of the plan by the way in which this rank ran the network.
        broken: Whether a collective failed, after which none can be called.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.plans: dict[int, Any] = {}
        self.seen: dict[Any, int] = {}
        self.broken = False

    def __deepcopy__(self, _: Any) -> Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find_ranks, (None, str(self.device))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> list[list[Any]]:
        """Return a few numbers of each rank."""
        own = torch.tensor(values, dtype=dtype, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._call(dist.all_gather, rows, own)
        return torch.stack(rows).tolist()

    def gather_objects(self, own: Any) -> list[Any]:
        """Return an object of each rank. It costs milliseconds."""
        objects: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, objects, own)
        return objects

    def broadcast_object(self, given: Any, source: int = 0) -> Any:
        """Return the object of one rank."""
        objects = [given]
        self._call(dist.broadcast_object_list, objects, group_src=source, device=self.device)
        return objects[0]

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0, in place."""
        self._call(dist.broadcast, tensor, group_src=0)
        return tensor

    def sum_(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, in place; the same bits on each."""
        self._call(dist.all_reduce, tensor)
        return tensor

    def sum_on_first_(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, in place, on rank 0."""
        self._call(dist.reduce, tensor, group_dst=0)
        return tensor

    def exchange(self, received: Tensor, sent: Tensor, from_each: list[int], to_each: list[int]) -> Any:
        """Send a part of a vector to each rank. Both vectors must stay until `wait` of what is returned."""
        return self._call(dist.all_to_all_single, received, sent, from_each, to_each, async_op=True)

    def wait(self, work: Any) -> None:
        """Wait for an exchange."""
        self._call(lambda group: work.wait())

    def raise_together(self, failed: Sequence[bool], error: BaseException | None) -> None:
        """Raise the error of one rank on all, if there is one; each rank knows which have `failed`."""
        if not any(failed):
            return
        first = list(failed).index(True)
        kind = next((each for each in KINDS if isinstance(error, each)), RuntimeError)
        kind, name, message = self.broadcast_object((kind, type(error).__name__, str(error)), first)
        if error is not None:
            raise error
        raise kind(f"rank {first} of {self.size} raised {name}: {message}")

    def _call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return collective(*args, group=self.group, **kwargs)
        except Exception:
            # Another rank is gone: whatever is called next would wait for it.
            self.broken = True
            raise


def find_ranks(process_group: Any, device: torch.device | str) -> Ranks | None:
    """Return the ranks of a process group, or None where there is one process.

    Args:
        process_group: A ProcessGroup, a DeviceMesh of one dimension, or None for the default group, if there is one.
        device: The device of the network.

    Raises:
        ValueError: It is neither, or this process is not part of it.
        RuntimeError: torch.distributed is not initialised although the environment says that it should be.
    """
    group = process_group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            _check_alone()
            return None
        group = dist.group.WORLD
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {group.ndim} dimensions: pass the one along which the samples are "
                "divided, as mesh['data']"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not part of process_group: build the optimizer on the members of the group only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "process_group must be None, a torch.distributed.ProcessGroup or a DeviceMesh of one dimension, got "
            f"{type(process_group).__name__}"
        )
    return Ranks(group, torch.device(device)) if dist.get_world_size(group) > 1 else None


def _check_alone() -> None:
    """Reject one of several processes that do not know of one another, each of which would take its own step."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"this process is part of several (WORLD_SIZE={world_size}), but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before building the optimizer, or unset WORLD_SIZE for steps "
            "of its own"
        )
