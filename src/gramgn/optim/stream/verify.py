"""Verification of J against autograd while a network is new: a wrong engine must not be silent.

Some networks defeat a layer-by-layer engine: they mix samples, pass intermediate results out of a module by a
side door, or change their state from call to call. J would then be wrong without any sign of it. Therefore J^T w
is compared, parameter by parameter, with one ordinary backward pass, for weights w that differ from row to row.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from gramgn.optim.runtime import is_capturing, probe_weights


class Verifier:
    """Remembers which networks have been compared, in which modes and for which shapes."""

    def __init__(self) -> None:
        self._verified: dict[Hashable, set[str]] = {}
        self._steps: dict[Hashable, int] = {}

    def begin(
        self, structure: Hashable, params: Mapping[str, Tensor], b: int, k: int, eps: float
    ) -> Comparison | None:
        """Return the comparison to make in this step, or None if there is none.

        The first step is compared. A parameter whose derivative is zero, as behind a last layer initialised to
        zero, proves nothing; it is compared again in steps 2, 4, 8 and so on until its derivative is not zero.
        `structure` identifies what was called, how often and in which mode.
        """
        if is_capturing():
            return None
        verified = self._verified.setdefault(structure, set())
        if len(verified) == len(params):
            return None
        steps = self._steps[structure] = self._steps.get(structure, 0) + 1
        if steps & (steps - 1):
            return None
        return Comparison(params, b, k, eps, verified)


class Comparison:
    """J^T w for weights w [b, k], from the engine (`pulled`, which it fills) and from autograd.

    Args:
        params: The trained parameters by name.
        b: Number of samples.
        k: Number of residuals per sample.
        eps: The relative precision in which J is formed.
        verified: Receives the names of the parameters whose part of J has been proved right.
    """

    def __init__(self, params: Mapping[str, Tensor], b: int, k: int, eps: float, verified: set[str]) -> None:
        device = next(iter(params.values())).device
        self.weights = probe_weights(b * k, device).view(b, k)
        self.pulled: dict[str, Tensor] = {}
        self._params, self._verified = params, verified
        self._eps = max(eps, *(torch.finfo(param.dtype).eps for param in params.values()))
        self._expected: dict[str, Tensor] = {}

    def expect(self, output: Tensor, slopes: Tensor, first: int) -> None:
        """Add autograd's J^T w for the samples from number `first`: `slopes` is dr/df [samples, k, q]."""
        w = self.weights[first : first + len(slopes)].to(slopes.device, slopes.dtype)
        of_output = torch.einsum("bk,bkq->bq", w, slopes).reshape(output.shape).to(output.dtype)
        grads = torch.autograd.grad(
            output, list(self._params.values()), of_output, retain_graph=True, allow_unused=True
        )
        for name, grad in zip(self._params, grads, strict=True):
            if grad is not None:
                held = self._expected.get(name)
                self._expected[name] = grad if held is None else held + grad

    def compare(self) -> None:
        """Reject J where it is not autograd's; record the parameters that it proves right."""
        expected = {
            name: self._expected[name] if name in self._expected else torch.zeros_like(param)
            for name, param in self._params.items()
        }
        sizes = {name: _largest(grad) for name, grad in expected.items()}
        largest = max(sizes.values())
        root = self._eps**0.5
        for name, grad in expected.items():
            pulled = self.pulled.get(name)
            error = _largest(grad if pulled is None else pulled.to(grad.dtype) - grad)
            if error > max(3 * root * sizes[name], 0.03 * root * largest):
                raise ValueError(_message(name, error / max(sizes[name], 1e-300)))
            if sizes[name] > 0.03 * root * largest:
                self._verified.add(name)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _message(name: str, error: float) -> str:
    return (
        f"parameter '{name}': the Jacobian that engine='stream' formed is not autograd's (relative error "
        f"{error:.0e}). Either the network mixes samples (as in x - x.mean(dim=0), or by a leading dimension that "
        "is not the samples'): each output must depend on its own sample only. Or it uses the parameter in a way "
        "that this engine cannot follow (a module that passes intermediate results to others, a state that changes "
        "from call to call, a tensor that all samples share and that is as long as the batch): use engine='vmap' "
        "or engine='loop'"
    )
