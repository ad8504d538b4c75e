"""The engines that form J from the graph of whatever the closure did, by one backward pass per row.

They need no samples. n rows in total, which are (sample, residual) where the closure returns [b, k].
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.closure import (
    Batch,
    Closure,
    Forward,
    Trained,
    call_closure,
    first_tensor,
    leading,
    replaced_forward,
)
from gramgn.optim.gram import BlockLinearisation, Engine
from gramgn.optim.guards import check_modes
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.outputs import transform_around
from gramgn.optim.runtime import attention_by_products, is_out_of_memory, jacobian_eps
from gramgn.optim.trees import tensors_in
from gramgn.optim.verify import Comparison, Verifier, check_samples_apart

ROWS_AT_A_TIME = 16
"""The number of rows whose backward passes `RowsEngine` batches; each holds the gradients of a whole batch."""


class LoopEngine(Engine):
    """The oracle: forms J row by row from the graph of one ordinary forward pass.

    Slow, and right for everything that autograd differentiates, samples that interact included.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def linearise(
        self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss
    ) -> BlockLinearisation:
        """Call `closure` once and differentiate each of its residuals; see `Engine`."""
        return self.of_graph(model, trained, *call_closure(model, closure, loss, _as_it_is))

    def of_graph(
        self,
        model: nn.Module,
        trained: Trained,
        reading: Reading,
        num_samples: int,
        calls: Sequence[tuple[Forward, Batch]] = (),
    ) -> BlockLinearisation:
        """Differentiate residuals with their graph. `calls`: those of the model, whose samples must not mix."""
        tensors = list(trained.params.values())
        rows = reading.differentiated.flatten()
        eps = jacobian_eps(model, rows.dtype, rows.device)
        modes = tuple(module.training for module in model.modules())
        check = self._verifier.begin((modes, tuple(trained.params)), trained.params)
        if check is not None and check.due:
            for original, batch in calls:
                check_samples_apart(model, original, batch, num_samples, trained.params)
        blocks = self.blocks(rows, tensors)
        by_name = {name: block.unsqueeze(1) for name, block in zip(trained.params, blocks, strict=True)}
        if check is not None and check.is_needed(by_name):
            # Finds gradients that are no derivatives.
            comparison = Comparison(trained.params, len(rows), 1, eps)
            with check.recorded() as verified:
                comparison.expect(rows)
                comparison.pull(by_name)
                verified |= comparison.compare(_no_derivative)
        if reading.root is not None:
            R = reading.root.mT
            blocks = [(R @ block.view(*R.shape[:2], -1)).flatten(end_dim=1) for block in blocks]
        reading = replace(reading.detached(), by_graph=True)
        return BlockLinearisation(reading, num_samples, eps, blocks, trained)

    def blocks(self, rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """Return J by parameter, one backward pass after the other."""
        blocks = [param.new_empty(len(rows), param.numel()) for param in params]
        for i, row in enumerate(rows):
            slopes = torch.autograd.grad(
                row, params, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for block, slope in zip(blocks, slopes, strict=True):
                block[i] = (slope.to_dense() if slope.is_sparse else slope).flatten()
        return blocks


class RowsEngine(LoopEngine):
    """Batches the backward passes of the loop, and lets the closure do what it wants with the model."""

    def __init__(self) -> None:
        super().__init__()
        self._batched = True
        self._noted = False

    def note(self, reason: str) -> None:
        """Report once that another engine takes rows in this way."""
        if not self._noted:
            self._noted = True
            warnings.warn(
                "GramGaussNewton: J is formed by one backward pass per row, as with engine='rows', which is slow, "
                f"because {reason}. Where each residual belongs to one sample, terms are faster: "
                "step(terms=[Term(residual, x), ...])",
                RuntimeWarning,
                stacklevel=5,
            )

    def linearise(
        self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss
    ) -> BlockLinearisation:
        """Call the closure as it is; the leading dimension of what it returns counts the samples."""
        check_modes(next(model.parameters()).device)
        calls: list[tuple[Forward, Batch]] = []
        outputs: list[Tensor] = []

        def forward(original: Forward, *args: Any, **kwargs: Any) -> Any:
            batch = Batch.of(args, kwargs)
            if batch is not None and not transform_around(batch.given):
                calls.append((original, batch))
            output = original(*args, **kwargs)
            outputs.extend(tensors_in(output))
            return output

        with replaced_forward(model, forward), attention_by_products():
            returned = closure()
        first, num_samples = leading(returned)
        # [b, 1] - [b] broadcasts to [b, b], which is compared with what the model returned.
        is_square = isinstance(first, Tensor) and first.ndim == 2 and first.shape[0] == first.shape[1] > 1
        reading = loss.read(returned, outputs[0] if is_square and outputs else first, num_samples)
        return self.of_graph(model, trained, reading, num_samples, calls)

    def blocks(self, rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """Return J by parameter, some rows at a time; from the first failure on, one by one."""
        if self._batched:
            try:
                parts = [
                    _batched_gradients(rows, params, start) for start in range(0, len(rows), ROWS_AT_A_TIME)
                ]
                return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._batched = False
                warnings.warn(
                    "GramGaussNewton: engine='rows' cannot batch the backward passes of this network, and takes the "
                    f"rows one by one, as engine='loop' does ({str(error).splitlines()[0]})",
                    RuntimeWarning,
                    stacklevel=6,
                )
        return super().blocks(rows, params)


def _batched_gradients(rows: Tensor, params: Sequence[Tensor], start: int) -> list[Tensor]:
    """Return the gradients of a range of rows, each [range, size]."""
    stop = min(start + ROWS_AT_A_TIME, len(rows))
    weights = rows.new_zeros(stop - start, len(rows))
    weights[range(stop - start), range(start, stop)] = 1
    slopes = torch.autograd.grad(
        rows, params, weights, retain_graph=True, is_grads_batched=True, allow_unused=True
    )
    return [
        param.new_zeros(stop - start, param.numel()) if slope is None else slope.reshape(stop - start, -1)
        for slope, param in zip(slopes, params, strict=True)
    ]


def _as_it_is(original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
    """Run the model as it is; the batch is the leading dimension of its first output."""
    returned = original(*args, **kwargs)
    first = first_tensor(returned)
    if transform_around([first]):
        return returned, None
    return returned, first.shape[0] if first.ndim else 1


def _no_derivative(name: str, error: float | None) -> str:
    """Return what is wrong where autograd disagrees with itself; see `Explain`."""
    return (
        f"parameter '{name}': the Jacobian that the engine formed is not autograd's (relative error {error:.0e}). The "
        "network, or the closure, contains a gradient that is no derivative (torch.autograd.Function): no engine can "
        "form J"
    )
