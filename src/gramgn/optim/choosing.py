"""The default engine: `torch.func` for networks that consist largely of modules without a rule, else streaming.

Where a module has no rule, the streaming engine runs it a second time under `torch.func`; if that is much of the
network, `torch.func` on the whole network is faster. Measured on two CPU cores for transformers (half of the parameters
in modules without a rule) and recurrent cells (nearly all).
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from gramgn.optim.closure import Closure, Forward, Trained, call_closure
from gramgn.optim.gram import Linearisation
from gramgn.optim.kernels import OFF
from gramgn.optim.losses import Loss
from gramgn.optim.outputs import NotBySampleError
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream import StreamEngine, find_owners
from gramgn.optim.vmap import VmapEngine, VmapRun

MOST_WITHOUT_RULE = 0.4
"""Share of the trained parameters in modules without a rule from which `torch.func` is preferred."""


class ChoosingEngine(StreamEngine):
    """Forms J by `torch.func` on a CPU for networks for which it is preferred, and for all others layer by layer.

    The rule depends on the network alone (`MOST_WITHOUT_RULE`). Where `torch.func` fails in the call of the model, or
    J that it formed is not autograd's, the same call runs layer by layer, and so do all later ones. The decision is
    part of `state_dict`.

    Attributes:
        by_vmap: The decision; None before the first step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.by_vmap: bool | None = None
        self._vmap = VmapEngine()

    def kernels_for(self, model: nn.Module, trained: Trained) -> str:
        """Return the form of the compiled kernels, which `torch.func` does not use."""
        return OFF if self._prefers_vmap(model, trained) else super().kernels_for(model, trained)

    def _prefers_vmap(self, model: nn.Module, trained: Trained) -> bool:
        return _is_preferred(model, trained) if self.by_vmap is None else self.by_vmap

    def linearise(self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss) -> Linearisation:
        """Call `closure` once and differentiate its result; see `Engine`."""
        if not self._prefers_vmap(model, trained):
            self.by_vmap = False
            return super().linearise(model, trained, closure, loss)
        by_vmap, streamed, reason = VmapRun(self._vmap, model, trained), self.start(model, trained), ""

        start = Snapshot(model, streamed.device)
        calls = 0

        def forward(
            original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, int | None]:
            nonlocal reason, calls
            calls += 1
            if reason:
                return streamed.forward(original, args, kwargs)
            state = Snapshot(model, streamed.device)
            try:
                return by_vmap.forward(original, args, kwargs)
            except Exception as error:  # whatever torch.func or the comparison reports
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                if calls > 1:
                    raise NotBySampleError(reason) from error
            # torch.func itself rejects what would change inputs in place.
            state.restore()
            return streamed.forward(original, args, kwargs)

        try:
            read = call_closure(model, closure, loss, forward)
            linearised = (streamed if reason else by_vmap).linearised(*read)
        except NotBySampleError as error:
            # The closure is called again, as it has seen outputs without the network's graph.
            reason = error.reason
            start.restore()
            linearised = super().linearise(model, trained, closure, loss)
        except Exception as error:
            if reason:
                error.add_note(f"torch.func, which was tried first, failed as well: {reason}")
            raise
        finally:
            by_vmap.clear()
            streamed.clear()
        was_by_vmap, self.by_vmap = self.by_vmap, not reason
        if was_by_vmap and reason:
            warnings.warn(
                "GramGaussNewton: torch.func, which the default engine chose for this network, failed in this step, "
                f"so J is formed layer by layer from now on ({reason})",
                RuntimeWarning,
                stacklevel=4,
            )
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
