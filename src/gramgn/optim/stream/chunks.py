"""Batches whose activations do not fit: some samples at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gramgn.optim.closure import Batch, Forward
from gramgn.optim.losses import Reading
from gramgn.optim.outputs import NotBySampleError, Outputs, transform_around
from gramgn.optim.runtime import span, without_fast_path
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.jacobian import ChainedJacobian, StreamLinearisation
from gramgn.optim.stream.run import Arguments, Run
from gramgn.optim.verify import Comparison, agree, explained

CHUNKED = "chunk_size, or a memory_budget that cannot hold J and all activations,"
CALLED_AGAIN = f"the closure calls the model several times, which {CHUNKED} does not allow"


def only_tensor(returned: Any) -> Tensor:
    """Return the output of a network that is run in chunks."""
    if not isinstance(returned, Tensor):
        raise ValueError(
            f"with {CHUNKED} the model must return one tensor, got {type(returned).__name__}: leave it out, raise the "
            "budget, or return one tensor"
        )
    return returned


@contextmanager
def in_chunk(start: int, stop: int, num_samples: int) -> Iterator[None]:
    """Explain a failure that dividing a batch may have caused."""
    try:
        yield
    except RuntimeError as error:
        if stop - start < num_samples:
            error.add_note(
                f"The network ran on samples {start} to {stop - 1} of {num_samples} (chunk_size or memory_budget): "
                "tensors whose samples are not in the leading dimension, as states [layers, b, ...], were not divided."
            )
        raise


class InChunks(Run):
    """Runs some samples at a time, forward and backward from the outputs, before the closure continues.

    All passes start from the state in which the closure found the network.

    Args:
        given: What every run is given.
        chunk: The number of samples at a time; None (default): the engine's.
        most: That of a pass without a graph; None (default): the whole batch.
        anew: See `Run`.
    """

    output: Tensor  # [b, ...] without a graph
    call: tuple[Forward, Batch]
    before: Snapshot  # the state in which the closure found the network

    def __init__(
        self, *given: Any, chunk: int | None = None, most: int | None = None, anew: bool = False
    ) -> None:
        super().__init__(*given, anew=anew)
        self._chunk, self.most = chunk, most

    @property
    def chunk(self) -> int:
        """The number of samples at a time."""
        if self._chunk is None:

            def forward(arguments: Arguments) -> Tensor:
                with self.reduced_precision():
                    return only_tensor(self.call[0](*arguments[0], **arguments[1]))

            self._chunk = self.engine.samples_at_a_time(self.call[1], self.model, forward)
        return self._chunk

    def anew(self) -> Run:
        """Return what forms the same J a second time; see `Run`."""
        return InChunks(self.engine, self.model, self.trained, chunk=self.chunk, most=self.most, anew=True)

    def take_call(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """Keep the closure's only call of the model, and the state in which it is made; return its batch."""
        batch = Batch(args, kwargs)
        reason = transform_around(batch.given)
        if reason or hasattr(self, "call"):
            raise NotBySampleError(reason or CALLED_AGAIN)
        self.before, self.call = Snapshot(self.model, self.device), (original, batch)
        return batch

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model and form the Jacobian of its outputs."""
        batch = self.take_call(original, args, kwargs)
        self.output, sums = self._summed(self.call, is_first=True)
        self.of_outputs = self.held(sums)
        self.verify(*self.call, sums, None)
        self.outputs = Outputs(self.trained, cut=True)
        return self.outputs.add(self.output, batch.size, batch.given), batch.size

    def linearised(self, reading: Reading, num_samples: int) -> StreamLinearisation:
        """Chain the derivative of the residuals to the Jacobian of the outputs."""
        slopes, _ = self.outputs.slopes(reading)
        J = ChainedJacobian(self.of_outputs, slopes.to(self.of_outputs.gram().device, torch.float64))
        return self.streamed(reading, num_samples, J, self.output)

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it in chunks; see `Run`."""
        assert sums.comparison is not None
        return self._summed((original, batch), sums, sums.comparison.state)[0]

    def _summed(
        self,
        call: tuple[Forward, Batch],
        sums: Accumulator | None = None,
        state: Snapshot | None = None,
        *,
        is_first: bool = False,
    ) -> tuple[Tensor, Accumulator]:
        """Return the outputs, and the sums that were filled: those given, or those of the step."""
        b = call[1].size

        def take(output: Tensor, start: int, stop: int) -> None:
            nonlocal sums
            self.backward.start(output, stop - start, self.network)
            flat = output.detach().reshape(stop - start, -1)
            q = flat.shape[1]
            if sums is None:
                sums = self.begin(b, q, flat, ahead=True)
            slopes = torch.eye(q, dtype=flat.dtype, device=flat.device).expand(stop - start, q, q)
            with torch.no_grad(), span("gramgn.backward"), self.reduced_precision():
                self.backward.run(slopes, sums, start)
            self.clear()

        try:
            output = self.outputs_of(call, self.chunk, take, self.record, state, is_first=is_first)
        finally:
            self.clear()
        assert sums is not None
        with torch.no_grad(), span("gramgn.backward"):
            sums.finish()
        return output, sums

    def outputs_of(
        self,
        call: tuple[Forward, Batch],
        chunk: int,
        take: Callable[[Tensor, int, int], None],
        record: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any] | None = None,
        state: Snapshot | None = None,
        *,
        is_first: bool = False,
    ) -> Tensor:
        """Run the model on all samples in chunks; `take` is given the output of each, and its range of samples.

        Args:
            call: The model's forward and its batch.
            chunk: The number of samples at a time.
            take: Uses the output of a chunk.
            record: Runs the forward in place of an ordinary call.
            state: Whose random numbers of Python and NumPy all chunks draw.
            is_first: Whether the closure sees what the model makes of its input in place.
        """
        (original, batch), outputs, changed = call, [], []
        for start in range(0, batch.size, chunk):
            stop = min(start + chunk, batch.size)
            # The model may change its input in place, and each pass starts from the same.
            part = Batch(*batch.chunk(start, stop)).copy()
            args, kwargs = part.chunk(0, stop - start)
            if state is not None:
                state.restore_python()
            with in_chunk(start, stop, batch.size):
                if record is None:
                    with self.reduced_precision():
                        output = only_tensor(original(*args, **kwargs))
                else:
                    output = only_tensor(record(original, args, kwargs))
                take(output, start, stop)
            outputs.append(output.detach().reshape(stop - start, *output.shape[1:]))
            del output
            for given, leaf, batched in zip(batch.leaves, part.leaves, batch.batched, strict=True):
                if is_first and isinstance(leaf, Tensor) and leaf._version:
                    changed.append((given[start:stop] if batched else given, leaf))
        if changed:
            self.call = original, batch.copy()
            for given, leaf in changed:
                given.copy_(leaf)
        return torch.cat(outputs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the network from the state in which the closure found it, and leave no further trace."""
        with Snapshot(self.model, self.device).kept(), torch.enable_grad():
            self.before.restore()
            yield

    def expected(self, sums: Accumulator, slopes: Tensor | None) -> bool:
        """Add autograd's J^T w of passes over other chunks to the sums' comparison; see `Run`."""
        if self.before.drew_random_numbers():
            return False
        assert sums.comparison is not None
        with self.again():
            output = self.expect(*self.call, sums.comparison, slopes)
        if not agree(output, self.output, sums.comparison.eps):
            raise ValueError(explained(type(self.model).__name__, None))
        self.check_apart(*self.call)
        return True

    def expect(
        self, original: Forward, batch: Batch, comparison: Comparison, slopes: Tensor | None
    ) -> Tensor:
        """Add autograd's J^T w of ordinary passes to a comparison; return the outputs.

        The batch is divided in another way, because what depends on the other samples of a chunk then differs. A pass
        without a graph over the whole batch, or over as much of it as fits, shows what depends on its size.
        """

        def take(output: Tensor, start: int, stop: int) -> None:
            own = None if slopes is None else slopes[start:stop]
            comparison.expect(output, own, start, keep_graph=False)

        state = Snapshot(self.model, self.device)
        outputs = self.outputs_of((original, batch), 2 * self.chunk, take, state=state)
        state.restore()
        with torch.no_grad(), without_fast_path():
            whole = self.outputs_of((original, batch), self.most or batch.size, lambda *_: None)
        if not agree(whole, outputs, comparison.eps):
            raise ValueError(explained(type(self.model).__name__, None))
        return outputs

    def check_apart(self, original: Forward, batch: Batch) -> None:
        """Reject a call that mixes samples, by some of the samples; see `Run`."""
        few = min(batch.size, 2 * self.chunk)
        super().check_apart(original, Batch(*batch.chunk(0, few)))
