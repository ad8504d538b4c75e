"""One step together: each rank linearises its samples; rank 0 solves and decides, and the others do what it orders.

J has the rows of all ranks, in their order. So `algorithm` and `acceptance` run on rank 0 as they are: where they need
a product with J, or the loss at a trial point, an order makes the other ranks do their part of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gramgn.optim.acceptance import Outcome, Trial
from gramgn.optim.algorithm import LinearModel
from gramgn.optim.closure import Closure, Trained
from gramgn.optim.gram import BlockLinearisation, Linearisation
from gramgn.optim.info import StepInfo
from gramgn.optim.losses import Reading
from gramgn.optim.ranks.exchange import Exchange, fail_together
from gramgn.optim.ranks.group import Ranks
from gramgn.optim.rows import RowsLinearisation, report_terms, totals
from gramgn.optim.runtime import drew_random_numbers, float64_home
from gramgn.optim.settings import OF_ALL, OF_GROUP
from gramgn.optim.stream import StreamEngine
from gramgn.optim.stream.blocks import FLAT
from gramgn.optim.stream.jacobian import ChainedJacobian, StreamLinearisation, chained_gram
from gramgn.optim.stream.products import Products
from gramgn.optim.terms import Term

if TYPE_CHECKING:
    from gramgn.optim.ggn import GramGaussNewton, StepBatch

JVP, VJP, TRY, DECIDED, FAILED = range(5)
"""What rank 0 orders."""


def start_together(optimizer: GramGaussNewton, ranks: Ranks) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks, which must have built the same optimizer."""
    model, trained = optimizer._model, optimizer._trained()
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    network = _number(
        (
            [(name, type(module)) for name, module in model.named_modules()],
            [(tuple(tensor.shape), tensor.dtype) for tensor in tensors],
        )
    )
    several = ranks.gather([_fingerprint(optimizer, trained), network], torch.int64)
    other = next((rank for rank, numbers in enumerate(several) if numbers != several[0]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} has another network, parameter groups or options than rank 0: build the optimizer alike on "
            "all ranks"
        )
    with torch.no_grad():
        for tensor in tensors:
            # As bytes, because not every backend knows every dtype.
            sent = tensor.contiguous().flatten().view(torch.uint8).to(ranks.device, copy=True)
            tensor.copy_(ranks.broadcast_(sent).view(tensor.dtype).view(tensor.shape))
    budget = optimizer._engine.budget if isinstance(optimizer._engine, StreamEngine) else None
    limit = None if budget is None else budget.bytes(next(iter(trained.params.values())).device)
    if budget is not None and limit is not None:
        # What is free differs between ranks, and their states must not.
        budget.resume(min(limit for (limit,) in ranks.gather([limit], torch.int64)))


def step_together(
    optimizer: GramGaussNewton, ranks: Ranks, closure: Closure | None, terms: Sequence[Term] | Term | None
) -> StepInfo:
    """Take the step of all ranks; without a closure and terms, this rank has no samples. See `GramGaussNewton.step`."""
    if ranks.broken:
        raise RuntimeError("another rank has ended, or did not answer in time: start all ranks again")
    engine, J, batch, exchange = optimizer._engine, None, None, None
    error: Exception | None = None
    try:
        batch = optimizer._batch(closure or _no_samples if terms is None else closure, terms)
        exchange = _exchange(optimizer, ranks, batch)
        if isinstance(engine, StreamEngine) and batch.objective is None:
            engine.shared = exchange
        if closure is not None or terms is not None:
            J = optimizer._linearise(batch)
    except Exception as raised:
        error = raised
    finally:
        if isinstance(engine, StreamEngine):
            engine.shared = None
    if error is not None and (ranks.broken or (exchange is not None and exchange.settled)):
        raise error
    if batch is None or exchange is None:
        fail_together(ranks, error)
    assert batch is not None
    assert exchange is not None
    objective, terms_of_all = batch.objective, ()
    if not exchange.begun:
        # Other engines than the streaming one, terms, and ranks without samples or with an error come here.
        b, n = (0, 0) if J is None else (J.num_samples, J.reading.residual.numel())
        exchange.begin(b, n, (type(engine), b, n, objective is None), error)
        if exchange.on_terms:
            terms_of_all = tuple(ranks.gather_objects(None if objective is None else objective.shown()))
            if objective is not None and isinstance(J, RowsLinearisation):
                J = objective.shared(J, totals(terms_of_all))
        if J is not None:
            _add_rows(exchange, J)
    joint = JointLinearisation.of(exchange, J, batch, error)
    info = optimizer._take(replace(batch, objective=None), joint, partial(_decided, optimizer, joint))
    info = replace(info, trace=joint.trace)
    return report_terms(info, terms_of_all) if terms_of_all else info


def _no_samples() -> None:
    raise AssertionError("a rank without samples has no residuals")


def _exchange(optimizer: GramGaussNewton, ranks: Ranks, batch: StepBatch) -> Exchange:
    """Return what takes the blocks of a step."""
    engine, trained = optimizer._engine, batch.trained
    terms = () if batch.objective is None else batch.objective.terms
    return Exchange(
        ranks,
        trained,
        engine._memories.products if isinstance(engine, StreamEngine) else Products(),
        (
            _fingerprint(optimizer, trained),
            _checksum(trained),
            _number([(term.name, term.weight) for term in terms]) if terms else 0,
        ),
        drop=isinstance(engine, StreamEngine) and engine.budget is not None and engine.budget.drops,
    )


def _fingerprint(optimizer: GramGaussNewton, trained: Trained) -> int:
    """Return a number that identifies the trained parameters and all options."""
    params = [(name, tuple(param.shape), param.dtype) for name, param in trained.params.items()]
    groups = [[group[key] for key in (*OF_GROUP, *OF_ALL)] for group in optimizer.param_groups]
    return _number((params, trained.groups, groups, optimizer._options, optimizer.counts["steps"]))


def _number(value: object) -> int:
    """Return a number that identifies what is shown of a value."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _checksum(trained: Trained) -> int:
    """Return a number that depends on each bit of the parameters."""
    sums = []
    for param in trained.params.values():
        bits = torch.int64 if param.dtype == torch.float64 else torch.int32
        sums.append(param.detach().view(bits).sum(dtype=torch.int64))
    total = 0
    for number in torch.stack(sums).tolist():
        total = (total * 1_000_003 + number) % (2**61 - 1)
    return total


def _add_rows(exchange: Exchange, J: Linearisation) -> None:
    """Add what an engine holds that does not hand its blocks over as they become complete."""
    params = exchange.trained.params
    if isinstance(J, BlockLinearisation):
        blocks = list(J.blocks)
    else:
        n = J.reading.residual.numel()
        blocks = [param.new_empty(n, param.numel()) for param in params.values()]
        J.write_rows_(blocks)
    for name, block in zip(params, blocks, strict=True):
        exchange.add_rows([name], [FLAT], block[None])


@dataclass
class JointLinearisation:
    """r and J of all ranks; see `Linearisation`. All ranks call its methods together.

    Attributes:
        reading: Loss and residuals of all ranks.
        num_samples: b.
        eps: The relative precision of the least precise rows.
        trained: The trained parameters.
        ranks: The ranks.
        own: The rows of this rank.
        local: Their Jacobian; None: there are none.
        G: G by group on rank 0; without rows on the others.
        drew: Whether random numbers were drawn on any rank while J was formed.
        trace: The trace of G, once rank 0 has decided.
        settled: Whether an error was raised on all ranks.
    """

    reading: Reading
    num_samples: int
    eps: float
    trained: Trained
    ranks: Ranks
    own: slice
    local: Linearisation | None
    G: Tensor
    drew: bool
    trace: float = math.nan
    settled: bool = False
    _orders: bool = False  # whether rank 0 orders what is called; else all ranks call it by themselves
    _shift: list[Tensor] | None = None  # s, on the ranks that were sent it

    @classmethod
    def of(
        cls, exchange: Exchange, J: Linearisation | None, batch: StepBatch, error: BaseException | None
    ) -> JointLinearisation:
        """Complete the exchange of rows, and share what rank 0 decides by.

        Raises:
            Exception: The error of any rank, on all of them.
        """
        ranks, device = exchange.ranks, next(iter(exchange.trained.params.values())).device
        if exchange.rehearsal is not None and exchange.plan is None:
            exchange.agree()  # the others do so after their rehearsal
        if exchange.plan is not None:
            exchange.send_rest(failed=error is not None)
        slopes = None
        own = [0.0] * 8
        if J is not None:
            r = J.reading.residual
            if isinstance(J, StreamLinearisation) and isinstance(J.jacobian, ChainedJacobian):
                slopes = J.jacobian.slopes
            drew = batch.before is not None and drew_random_numbers(batch.before.random, batch.before.device)
            own = [
                len(r),
                0 if r.ndim == 1 else r.shape[1],
                float(J.reading.loss),
                J.eps,
                r.dtype == torch.float64,
                drew,
                J.reading.by_graph,
                0 if slopes is None else slopes.shape[2],
            ]
        rows = ranks.gather([error is not None, exchange.fits() or not exchange.drop, exchange.fits(), *own])
        failed, redoable, fit, lengths, ks, losses, eps, doubles, drawn, by_graph, q = zip(*rows, strict=True)
        ranks.raise_together(failed, error)
        if not all(redoable) and exchange.plan is not None:
            raise ValueError(
                f"rank {redoable.index(False)} formed the rows of J in another way than the ranks had agreed on, and "
                "memory_budget has dropped them: leave it out"
            )
        if not all(fit):
            exchange.agree()
            exchange.send_rest()
        seen = [rank for rank, length in enumerate(lengths) if length]
        k = int(ks[seen[0]])
        if any(int(ks[rank]) != k for rank in seen):
            raise ValueError(
                f"the ranks return different numbers of residuals per sample: {[int(each) for each in ks]}"
            )
        sizes = [int(length) * max(1, k) for length in lengths]
        n, start = sum(sizes), sum(sizes[: ranks.rank])
        place = slice(start, start + sizes[ranks.rank])
        r = torch.zeros(n, dtype=torch.float64, device=ranks.device)
        if J is not None:
            r[place] = J.reading.residual.flatten().to(r)
        r = ranks.sum_(r).to(device, torch.float64 if any(doubles) else torch.float32)
        r = r.view(-1, k) if k else r
        loss = sum(size * value for size, value in zip(sizes, losses, strict=True) if size) / n
        G = exchange.reduced()
        if max(q):
            b = exchange.num_samples
            S = torch.zeros(b, max(1, k), int(max(q)), dtype=torch.float64, device=ranks.device)
            first = sum(exchange.samples[: ranks.rank])
            own_S = S[first : first + exchange.samples[ranks.rank]]
            # A rank that did not divide its samples into chunks has the rows of the residuals, not of the outputs.
            own_S.copy_(torch.eye(*S.shape[1:]) if slopes is None else slopes)
            ranks.sum_on_first_(S)
            G = chained_gram(G, S) if ranks.leads else G
        reading = Reading(torch.tensor(loss, dtype=torch.float64), r, r, by_graph=any(by_graph))
        return cls(
            reading,
            exchange.num_samples,
            max(eps),
            exchange.trained,
            ranks,
            place,
            J,
            G.to(float64_home(device)),
            any(drawn),
        )

    def gram(self) -> Tensor:
        """Return G by group on rank 0; without rows on the others."""
        return self.G

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d [n]."""
        self.order(JVP)
        return self.jvp_together(direction)

    def jvp_together(self, direction: Sequence[Tensor] | None) -> Tensor:
        """Return J d [n] for the direction of rank 0."""
        params = list(self.trained.params.values())
        flat = self._flat()
        if direction is not None:
            flat.copy_(torch.cat([d.flatten().to(flat) for d in direction]))
        received = self._split(self.ranks.broadcast_(flat))
        if direction is None and self._shift is None:
            self._shift = received
        product = torch.zeros(
            self.reading.residual.numel() + 1, dtype=torch.float64, device=self.ranks.device
        )

        def own() -> None:
            if self.local is not None:
                given = [d.to(param) for d, param in zip(received, params, strict=True)]
                product[self.own] = self.local.jvp(given).to(product)

        self._sum_(product, own)
        return product[:-1].to(self.G.device)

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u, times one factor per parameter, to tensors like the parameters, in place."""
        if self.order(VJP, scales):
            self.ranks.broadcast_(u.to(self.ranks.device, copy=True))
        self.add_vjp_together_(out, u, scales)

    def add_vjp_together_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add the sum of all ranks' J_r^T u_r."""
        flat = self._flat(1)
        pulled = self._split(flat)

        def own() -> None:
            if self.local is not None:
                self.local.add_vjp_(pulled, u[self.own], [1.0] * len(pulled))

        self._sum_(flat, own)
        for tensor, part, scale in zip(out, pulled, scales, strict=True):
            tensor.add_(part.to(tensor), alpha=scale)

    def write_rows_(self, out: Sequence[Tensor]) -> None:
        """Reject it: no rank holds the rows of all."""
        raise ValueError("the rows of J are wanted, of which each rank holds those of its samples only")

    def loss_at(self, evaluate: Callable[[], float]) -> float:
        """Return the loss of all ranks, each of which evaluates its own."""
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)

        def own() -> None:
            if self.local is not None:
                total[0] = evaluate() * (self.own.stop - self.own.start) / self.reading.residual.numel()

        self._sum_(total, own)
        return float(total[0])

    def order(self, code: int, numbers: Sequence[float] = (), *, flag: bool = False) -> bool:
        """Order on rank 0 what the other ranks are to call; return whether anything was ordered."""
        if not self._orders:
            return False
        order = torch.zeros(2 + len(self.trained.groups), dtype=torch.float64, device=self.ranks.device)
        order[: 2 + len(numbers)] = torch.tensor([code, flag, *numbers], dtype=torch.float64)
        self.ranks.broadcast_(order)
        return True

    def lead(self, decide: Callable[[], Outcome], groups: Sequence[dict[str, Any]], trace: float) -> Outcome:
        """Decide on rank 0, and let the other ranks know."""
        self._orders, self.trace = True, trace
        error: Exception | None = None
        try:
            outcome = decide()
        except Exception as raised:
            error = raised
        if error is not None:
            if not self.settled and not self.ranks.broken:
                self.order(FAILED)
                self.ranks.raise_together([True], error)
            raise error
        self.order(DECIDED)
        self._orders = False
        step = outcome.step
        solution = replace(step.solution, u=step.solution.u.cpu())
        sent = replace(step, direction=None, solution=solution, change=step.change.cpu())
        alphas = [group["alpha"] for group in groups]
        self.ranks.broadcast_object((replace(outcome, step=sent), step.direction is not None, alphas, trace))
        return outcome

    def follow(self, trial: JointTrial | None, groups: Sequence[dict[str, Any]]) -> Outcome:
        """Do what rank 0 orders until it has decided; return what it decided."""
        d: list[Tensor] = []
        params = list(self.trained.params.values())
        while True:
            order = torch.empty(2 + len(params), dtype=torch.float64, device=self.ranks.device)
            code, flag, *numbers = self.ranks.broadcast_(order).tolist()
            if code == JVP:
                self.jvp_together(None)
            elif code == VJP:
                u = torch.empty(self.reading.residual.numel(), dtype=torch.float64, device=self.ranks.device)
                self.ranks.broadcast_(u)
                shift = self._shift or [torch.zeros_like(param) for param in params]
                d = [s.to(param, copy=True).view(param.shape) for s, param in zip(shift, params, strict=True)]
                self._shift = None
                self.add_vjp_together_(d, u.to(self.G.device), numbers)
            elif code == TRY:
                assert trial is not None
                own = partial(Trial.evaluate, trial, None if flag else d, numbers[: self.trained.num_groups])
                self.loss_at(own)
            elif code == FAILED:
                self.ranks.raise_together([True], None)
            else:
                break
        outcome, explicit, alphas, self.trace = self.ranks.broadcast_object(None)
        for group, alpha in zip(groups, alphas, strict=True):
            group["alpha"] = alpha
        step, home = outcome.step, self.G.device
        solution = replace(step.solution, u=step.solution.u.to(home))
        step = replace(
            step, direction=d if explicit else None, solution=solution, change=step.change.to(home)
        )
        return replace(outcome, step=step)

    def _flat(self, more: int = 0) -> Tensor:
        """Return zeros for all parameters, and `more`."""
        params = self.trained.params.values()
        dtype = reduce(torch.promote_types, (param.dtype for param in params))
        m = sum(param.numel() for param in params)
        return torch.zeros(m + more, dtype=dtype, device=self.ranks.device)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter, in its shape."""
        params = self.trained.params.values()
        m = sum(param.numel() for param in params)
        parts = flat[:m].split([param.numel() for param in params])
        return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]

    def _sum_(self, total: Tensor, own: Callable[[], None]) -> None:
        """Add what `own` writes on each rank. The last entry counts the ranks on which it failed."""
        error: Exception | None = None
        try:
            own()
        except Exception as raised:
            error = raised
            total.zero_()
            total[-1] = 1
        self.ranks.sum_(total)
        if total[-1] > 0:
            self.settled = True
            self.ranks.raise_together(
                [bool(flag) for (flag,) in self.ranks.gather([error is not None])], error
            )


class JointTrial(Trial):
    """Evaluates the loss of all ranks."""

    def drew_random_numbers(self) -> bool:
        """Return whether any rank drew random numbers when J was formed."""
        return self._joint.drew

    def evaluate(self, direction: Sequence[Tensor] | None, lr: Sequence[float]) -> float:
        """Return the loss of all ranks at w_g + lr_g d_g; None: at w."""
        self._joint.order(TRY, lr, flag=direction is None)
        return self._joint.loss_at(lambda: super(JointTrial, self).evaluate(direction, lr))

    @property
    def _joint(self) -> JointLinearisation:
        assert isinstance(self.model.J, JointLinearisation)
        return self.model.J


def _decided(
    optimizer: GramGaussNewton, joint: JointLinearisation, model: LinearModel, batch: StepBatch
) -> Outcome:
    """Return the outcome that rank 0 decides on; on the others after doing their part of what that takes."""
    groups = optimizer.param_groups
    if joint.ranks.leads:
        return joint.lead(lambda: optimizer._decide(model, batch, JointTrial), groups, model.trace)
    before = batch.before
    trial = None if before is None else JointTrial(optimizer._for_loss(batch), optimizer._loss, model, before)
    return joint.follow(trial, groups)
