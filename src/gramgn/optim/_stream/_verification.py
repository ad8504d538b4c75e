"""A check, made while a network is new, that J is what autograd says: an engine that is wrong must not be silent.

What a layer-by-layer engine cannot see would give a wrong Jacobian without a word: samples that are mixed,
intermediate results that leave a module by a side door, a state that changes from call to call. So J^T w for
weights w that differ from row to row is compared, parameter by parameter, with one ordinary backward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from gramgn.optim.runtime import is_capturing


class Verifier:
    """Remembers which networks, in which mode and for which shapes, were compared."""

    def __init__(self) -> None:
        self._verified: dict[Hashable, set[str]] = {}
        self._steps: dict[Hashable, int] = {}

    def begin(
        self, structure: Hashable, params: Mapping[str, Tensor], b: int, k: int, eps: float
    ) -> Comparison | None:
        """Return a comparison to make in this step, or None.

        A parameter whose derivative is zero, as they are before a zero last layer, proves nothing: it is looked at
        again in steps 2, 4, 8 and so on.

        Args:
            structure: What was called, how often and in which mode.
            params: The trained parameters by name.
            b: Samples.
            k: Residuals a sample.
            eps: The relative precision in which J is formed.
        """
        if is_capturing():
            return None
        verified = self._verified.setdefault(structure, set())
        if len(verified) == len(params):
            return None
        steps = self._steps[structure] = self._steps.get(structure, 0) + 1
        if steps & (steps - 1):
            return None
        device = next(iter(params.values())).device
        eps = max(eps, *(torch.finfo(param.dtype).eps for param in params.values()))
        return Comparison(params, b, k, eps, device, verified)


class Comparison:
    """J^T w from the engine and from autograd; see ``Verifier.begin``."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        b: int,
        k: int,
        eps: float,
        device: torch.device,
        verified: set[str],
    ) -> None:
        # Multiples of the golden ratio, modulo 1, keep near and far rows apart without random numbers.
        rows = torch.arange(b * k, dtype=torch.float64)
        self.weights = (1 + (rows * 0.618034) % 1).view(b, k)
        self.pulled: dict[str, Tensor] = {}
        self._params, self._eps, self._device, self._verified = params, eps, device, verified
        self._expected: dict[str, Tensor] = {}

    def expect(self, output: Tensor, slopes: Tensor, first: int) -> None:
        """Add autograd's J^T w for a range of samples.

        Args:
            output: The model's output for them, with its graph.
            slopes: dr/df [samples, k, q].
            first: The place of the first in the batch.
        """
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
        """Compare, and remember what was found right.

        Raises:
            ValueError: A parameter's part of J is not autograd's.
        """
        expected = {
            name: self._expected[name] if name in self._expected else torch.zeros_like(param)
            for name, param in self._params.items()
        }
        sizes = {name: float(grad.abs().max()) if grad.numel() else 0.0 for name, grad in expected.items()}
        largest = max(sizes.values())
        root = self._eps**0.5
        for name, grad in expected.items():
            pulled = self.pulled.get(name)
            error = (
                float((grad if pulled is None else pulled.to(grad.dtype) - grad).abs().max())
                if grad.numel()
                else 0.0
            )
            if error > max(3 * root * sizes[name], 0.03 * root * largest):
                raise ValueError(_message(name, error / max(sizes[name], 1e-300)))
            if sizes[name] > 0.03 * root * largest:
                self._verified.add(name)


def _message(name: str, error: float) -> str:
    return (
        f"parameter '{name}': the Jacobian that engine='stream' formed is not autograd's (relative error "
        f"{error:.0e}). Either the network mixes samples (such as x - x.mean(dim=0), or another dimension than the "
        "samples' in front): each output must depend on its own sample only. Or it uses the parameter in a way "
        "that this engine cannot follow (a module that hands out intermediate results, a state that changes from "
        "call to call, a tensor that all samples share and that is as long as the batch): take engine='vmap' or "
        "engine='loop'"
    )
