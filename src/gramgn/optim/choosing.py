"""The default engine: `torch.func` for networks that consist largely of modules without a rule, else streaming.

Where a module has no rule, the streaming engine runs it a second time under `torch.func`; if that is much of the
network, `torch.func` on the whole network is faster. Measured on two CPU cores for transformers (half of the parameters
in modules without a rule) and recurrent cells (nearly all).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gramgn.optim.closure import Batch, Closure, Trained
from gramgn.optim.gram import Linearisation
from gramgn.optim.losses import Loss
from gramgn.optim.stream import StreamEngine, find_owners
from gramgn.optim.vmap import VmapEngine

MOST_WITHOUT_RULE = 0.4
"""Share of the trained parameters in modules without a rule from which `torch.func` is preferred."""


class ChoosingEngine(StreamEngine):
    """Streams in the first step, and then decides by which engine J is formed from the second step on.

    The rule depends on the network alone: `torch.func` on a CPU where it is preferred (`MOST_WITHOUT_RULE`) and works,
    tried on the first batch without a trace. The decision is part of `state_dict`.

    Attributes:
        by_vmap: The decision; None before the first step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.by_vmap: bool | None = None
        self._vmap = VmapEngine()

    def linearise(self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss) -> Linearisation:
        """Call `closure` once and differentiate its result; see `Engine`."""
        if self.by_vmap:
            return self._vmap.linearise(model, trained, closure, loss)
        if self.by_vmap is None and not _is_preferred(model, trained):
            self.by_vmap = False
        if self.by_vmap is not None:
            return super().linearise(model, trained, closure, loss)
        batches: list[Batch] = []
        handle = model.register_forward_pre_hook(
            lambda _, args, kwargs: batches.append(Batch(args, kwargs)), with_kwargs=True
        )
        try:
            linearised = super().linearise(model, trained, closure, loss)
        finally:
            handle.remove()
        self.by_vmap = self._vmap.works(model, trained.params, batches[0])
        return linearised

    def state_dict(self) -> dict[str, Any]:
        """Return the choices of the streaming engine, and the decision."""
        return {**super().state_dict(), "by_vmap": self.by_vmap}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt earlier choices; a state without a decision is of the streaming engine."""
        super().load_state_dict(state)
        self.by_vmap = state.get("by_vmap", False)


def _is_preferred(model: nn.Module, trained: Trained) -> bool:
    owners = find_owners(model, trained.params, replaced=False)
    names = {name for owner in owners if owner.rule is None for name in owner.params.values()}
    sizes = {name: param.numel() for name, param in trained.params.items()}
    without = sum(sizes[name] for name in names)
    on_cpu = all(param.device.type == "cpu" for param in trained.params.values())
    return on_cpu and without >= MOST_WITHOUT_RULE * sum(sizes.values())
