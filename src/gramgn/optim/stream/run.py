"""One step of the streaming engine: what all ways of forming J have in common, and the whole batch at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gramgn.optim.closure import Batch, Forward, Trained, flatten_call
from gramgn.optim.gram import Linearisation
from gramgn.optim.kept import structure_of
from gramgn.optim.losses import Reading
from gramgn.optim.outputs import OTHER_PARAMETERS, NotBySampleError, Outputs, joined, transform_around
from gramgn.optim.runtime import attention_by_products, jacobian_eps, reduced_precision, span
from gramgn.optim.stream.accumulate import Accumulator, GramSum
from gramgn.optim.stream.backward import Backward, Network
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.capture import find_owners, recorded, recorded_calls
from gramgn.optim.stream.jacobian import GraphJacobian, HeldJacobian, Jacobian, StreamLinearisation
from gramgn.optim.verify import SLACK, Check, Comparison, check_outputs, check_samples_apart, verify

if TYPE_CHECKING:
    from gramgn.optim.stream.engine import StreamEngine

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Shared(Protocol):
    """Takes the blocks of J of this process's samples in a step that several processes share."""

    def begin(self, num_samples: int, num_rows: int, way: Hashable) -> GramSum:
        """Return what takes the blocks. `way`: identifies how the network was run."""


class Run:
    """What all ways of forming J in one step have in common.

    `anew`: J is formed a second time, in full precision and in memory of its own, to be compared with autograd.
    """

    check: Check | None = None  # of this step
    due = False  # whether it is made in any case
    drop = False  # whether J is not held: its blocks are dropped once they are multiplied

    def __init__(
        self, engine: StreamEngine, model: nn.Module, trained: Trained, *, anew: bool = False
    ) -> None:
        self.engine, self.model, self.trained = engine, model, trained
        self.memories = replace(engine._memories, buffers=Buffers()) if anew else engine._memories
        self.dtype = None if anew else engine.jacobian_dtype
        self.device = next(iter(trained.params.values())).device
        self.backward = Backward(trained.params, self.memories)

    def forward(
        self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run the model; see `call_closure`."""
        raise NotImplementedError

    def linearised(self, reading: Reading, num_samples: int) -> Linearisation:
        """Return the residuals with their J."""
        raise NotImplementedError

    def streamed(
        self, reading: Reading, num_samples: int, jacobian: Jacobian, output: Tensor
    ) -> StreamLinearisation:
        """Return the residuals with a J."""
        eps = jacobian_eps(self.model, output.dtype, output.device, self.engine.jacobian_dtype)
        return StreamLinearisation(reading.detached(), num_samples, eps, self.trained, jacobian)

    def reduced_precision(self) -> AbstractContextManager[Any]:
        """Return autocast to the engine's shorter format, if there is one."""
        return reduced_precision(self.dtype, self.device)

    def record(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, and record the calls of parameter owners for the backward pass."""
        self.network = self._current_network(original)
        record = (self.device, self.backward.calls, self.backward.receive)
        owners = [owner for owner in self.network.owners if owner.module is not self.model]
        for root in self.network.owners:
            if root.module is self.model:
                original = recorded(root, original, *record)
        # Fused attention has no second derivatives.
        attention = attention_by_products() if self.drop else nullcontext()
        with span("gramgn.forward"), recorded_calls(owners, *record), self.reduced_precision(), attention:
            return original(*args, **kwargs)

    def _current_network(self, original: Forward) -> Network:
        """Return what follows from the network's modules, as they are now."""
        model, trained = self.model, self.trained
        replaced = getattr(original, "__func__", None) is not type(model).forward

        def read() -> Network:
            owners = find_owners(model, trained.params, replaced=replaced)
            if {name for owner in owners for name in owner.params.values()} != set(trained.params):
                raise NotBySampleError(OTHER_PARAMETERS)
            return Network(
                owners,
                {id(param): name for name, param in trained.params.items()},
                tuple(module.training for module in model.modules()),
            )

        return self.memories.network.get([trained, replaced, *structure_of(model)], read)

    def begin(
        self,
        b: int,
        k: int,
        output: Tensor,
        *,
        drop: bool = False,
        ahead: bool = False,
        until_verified: bool = False,
    ) -> Accumulator:
        """Return an empty sum, with the comparison that is due in this step; see `Verifier`.

        `ahead`: with one also where it may turn out to be due, and with the tolerance for two passes.
        `until_verified`: it is due in each step until all of J has been seen to agree.
        """
        structure = (b, k, self.structure())
        self.eps = jacobian_eps(self.model, output.dtype, output.device, self.dtype)
        self.check = check = self.memories.verifier.begin(structure, self.trained.params)
        shared = self.engine.shared
        unverified = check.unverified if check else []
        self.due = check is not None and (check.due or (until_verified and bool(unverified)))
        comparison = None
        if self.due or (ahead and unverified):
            slack = {"slack": SLACK} if ahead else {}
            comparison = Comparison(self.trained.params, b, k, self.eps, **slack)
        return Accumulator(
            self.trained,
            b,
            k,
            self.memories.buffers,
            self.memories.products,
            grams=shared.begin(b, b * k, structure) if shared else None,
            drop=drop,
            comparison=comparison,
            watched=unverified,
        )

    def woke(self, sums: Accumulator) -> bool:
        """Return whether a block of complete sums that was never compared has become other than zero."""
        if self.check is None or not sums.norms:
            return False
        return self.check.woke(sums.norms, sums.grams.norm())

    def structure(self) -> Any:
        """Return a value that identifies the way in which the network was run."""
        return self.backward.structure()

    def verify(
        self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None, *, again: bool = True
    ) -> None:
        """Compare complete sums with autograd where that is due, or where a block of J is other than zero at last.

        `again`: whether the call can be repeated.
        """
        check = self.check
        if check is None:
            return
        woke = self.woke(sums)
        if not self.due and not (woke and again):
            return
        if self.expected(sums, slopes):
            assert sums.comparison is not None
            full = self.eps <= max(torch.finfo(param.dtype).eps for param in self.trained.params.values())
            suffices = full or not again
            with check.recorded() as verified:
                verified |= sums.comparison.compare()
                if not suffices:
                    verified.clear()
            if suffices:
                return
        run = self.anew()

        def plain(comparison: Comparison) -> Tensor:
            return run.expect(original, batch.copy(), comparison, slopes)

        def engine(comparison: Comparison) -> Tensor:
            buffers, products = run.memories.buffers, run.memories.products
            anew = Accumulator(
                self.trained, sums.b, sums.k, buffers, products, drop=True, comparison=comparison
            )
            try:
                return run.form(original, batch.copy(), anew, slopes)
            finally:
                self.backward.may_mix |= run.backward.may_mix
                run.clear()

        verify(check, self.model, batch.size, plain, engine, k=sums.k)
        self.check_apart(original, batch)

    def expected(self, sums: Accumulator, slopes: Tensor | None) -> bool:
        """Return whether the comparison of complete sums has what autograd expects, in the precision of the step."""
        raise NotImplementedError

    def expect(
        self, original: Forward, batch: Batch, comparison: Comparison, slopes: Tensor | None
    ) -> Tensor:
        """Add autograd's J^T w of ordinary passes to a comparison; return the outputs."""
        raise NotImplementedError

    def check_apart(self, original: Forward, batch: Batch) -> None:
        """Reject a call that mixes samples, where a comparison with autograd would not show it."""
        if self.backward.may_mix:
            check_samples_apart(self.model, original, batch, batch.size, self.trained.params)

    def anew(self) -> Run:
        """Return what forms the same J a second time, in full precision and in memory of its own."""
        raise NotImplementedError

    def held(self, sums: Accumulator) -> HeldJacobian:
        """Return J of complete sums, whose memory stays until the next step."""
        self.memories.buffers.keep({name: held.rows for name, held in sums.held.items()})
        return HeldJacobian(sums)

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form J once more in given sums, for dr/df [b, k, q] or the outputs themselves; return the outputs."""
        raise NotImplementedError

    def clear(self) -> None:
        """Release the graph."""
        self.backward.clear()


class AtOnce(Run):
    """Runs the whole batch forward, and backward once the closure has determined the slopes of the residuals.

    The closure gets outputs with their graph, so it may call the model several times, and use parts of what it returns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs = Outputs(self.trained, cut=False)
        self.calls: list[tuple[Forward, Batch]] = []
        self.used: Sequence[int] = ()  # the numbers of the outputs on which the residuals depend

    def anew(self) -> AtOnce:
        """Return what forms the same J a second time; see `Run`."""
        run = AtOnce(self.engine, self.model, self.trained, anew=True)
        run.used = self.used
        return run

    def forward(
        self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run the model."""
        reason = transform_around(flatten_call(args, kwargs)[0])
        if reason:
            self.outputs.leave_out(reason)
            with self.reduced_precision():
                return original(*args, **kwargs), None
        batch = Batch(args, kwargs)
        try:
            returned = self.record(original, args, kwargs)
        except NotBySampleError as error:
            self.outputs.leave_out(error.reason)
            return original(*args, **kwargs), batch.size
        self.calls.append((original, batch))
        return self.outputs.add(returned, batch.size, batch.given), batch.size

    def linearised(self, reading: Reading, num_samples: int) -> Linearisation:
        """Return the residuals with their J, which is formed row by row where nothing else can be right."""
        try:
            slopes, self.used = self.outputs.slopes(reading)
        except NotBySampleError as error:
            self.engine.rows.note(error.reason)
            if self.engine.budget is not None:
                size = reading.residual.numel() * sum(param.nbytes for param in self.trained.params.values())
                self.engine.budget.check(size, "J, which is formed row by row here and held,")
            return self.engine.rows.of_graph(self.model, self.trained, reading, num_samples, self.calls)
        self.output = joined([self.outputs.tensors[i] for i in self.used])
        return self.streamed(reading, num_samples, self._jacobian(slopes, num_samples), self.output)

    def _jacobian(self, slopes: Tensor, b: int) -> Jacobian:
        """Run the backward pass."""
        self.backward.start(self.output, b, self.network)
        k = slopes.shape[1]
        drop = self.drop
        if drop and k > 1:
            raise ValueError(
                f"without chunk_size, memory_budget holds the blocks of one residual per sample here, and the closure "
                f"made {k} of one output: set the engine's chunk_size too, or leave memory_budget out"
            )
        # Several calls that depend on one another cannot be repeated one by one, so they are compared in the step.
        several = len(self.calls) > 1
        sums = self.begin(b, k, self.output, drop=drop, until_verified=several)
        if sums.comparison is not None:
            for call in self.calls:
                self.check_apart(*call)
            self.backward.expect(sums.comparison, slopes)
        with torch.no_grad(), span("gramgn.backward"):
            if sums.grams.rehearsal is not None:
                self._rehearse(slopes, sums, sums.grams.rehearsal)
            with self.reduced_precision():
                self.backward.run(slopes, sums, keep_graph=drop)
            sums.finish()
        J = GraphJacobian(sums.G, self.output, slopes, self.trained.params) if drop else self.held(sums)
        self.verify(*self.calls[0], sums, slopes, again=not several)
        return J

    def _rehearse(self, slopes: Tensor, sums: Accumulator, rehearsal: GramSum) -> None:
        """Run the backward pass without keeping a block, to see which blocks there are in which order."""
        once = Accumulator(self.trained, sums.b, sums.k, Buffers(), sums.products, grams=rehearsal, drop=True)
        with self.reduced_precision():
            self.backward.run(slopes, once, keep_graph=True, again=True)
        once.finish()
        sums.grams.agree()

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it in one go; see `Run`."""
        assert slopes is not None
        args, kwargs = batch.chunk(0, batch.size)
        output = self._selected(self.record(original, args, kwargs), batch.size)
        self.backward.start(output, batch.size, self.network)
        with torch.no_grad():
            self.backward.run(slopes, sums)
            sums.finish()
        return output.detach()

    def expected(self, sums: Accumulator, slopes: Tensor | None) -> bool:
        """Return whether the comparison was made with the graph of the step; see `Run`."""
        return self.due

    def expect(
        self, original: Forward, batch: Batch, comparison: Comparison, slopes: Tensor | None
    ) -> Tensor:
        """Add autograd's J^T w of an ordinary pass over the whole batch to a comparison; return the outputs."""
        args, kwargs = batch.chunk(0, batch.size)
        output = check_outputs(self._selected(original(*args, **kwargs), batch.size), self.model, batch.size)
        comparison.expect(output, slopes)
        return output.detach()

    def _selected(self, returned: Any, b: int) -> Tensor:
        """Return the outputs of one call that are used."""
        outputs = Outputs(self.trained, cut=False)
        outputs.add(returned, b, ())
        return joined([outputs.tensors[i] for i in self.used])
