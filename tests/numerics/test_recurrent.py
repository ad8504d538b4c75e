"""Recurrent layers, cells, and layers called for every step, against the dense Jacobian in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Exponential, Problem, relative_error
from test_optim_engines import assert_right, linearised, of_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gramgn import GramGaussNewton, Term
from gramgn.optim import Loop, Stream, Vmap

B, T, SIZE, HIDDEN = 4, 5, 3, 4

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}

Reading = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A recurrent part behind a linear layer; `read` says how it is used."""

    def __init__(self, kind: type[nn.Module], read: Reading, **options: Any) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(SIZE, SIZE), read
        self.rnn = kind(SIZE, HIDDEN, **options)
        self.head = nn.LazyLinear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, torch.tanh(self.embed(x)))


def states(returned: Any) -> tuple[Tensor, ...]:
    """Return h_n, and c_n of an LSTM."""
    return returned[1] if isinstance(returned[1], tuple) else (returned[1],)


def last_output(net: Net, x: Tensor) -> Tensor:
    return net.head(net.rnn(x)[0][:, -1])


def every_output(net: Net, x: Tensor) -> Tensor:
    return net.head(net.rnn(x)[0]).squeeze(2)


def last_states(net: Net, x: Tensor) -> Tensor:
    return net.head(torch.cat([state.transpose(0, 1).flatten(1) for state in states(net.rnn(x))], dim=1))


def everything(net: Net, x: Tensor) -> Tensor:
    output, last = net.rnn(x)
    both = states((output, last)) + states(net.rnn(x.cos()))
    return net.head(output).sum(dim=1) + sum(state.sin().sum(dim=(0, 2)) for state in both)[:, None]


def first_layer_only(net: Net, x: Tensor) -> Tensor:
    return net.head(states(net.rnn(x))[0][0])


def time_first(net: Net, x: Tensor) -> Tensor:
    return net.head(net.rnn(x.transpose(0, 1))[0][-1])


def given_states(net: Net, x: Tensor) -> Tensor:
    layers = net.rnn.num_layers * (2 if net.rnn.bidirectional else 1)
    h = torch.stack(
        [net.embed(x[:, i % T]).repeat(1, 2)[:, : net.rnn.proj_size or HIDDEN] for i in range(layers)]
    )
    c = torch.stack([net.embed(x[:, i % T]).repeat(1, 2)[:, :HIDDEN] for i in range(layers)])
    return net.head(net.rnn(x, (h, c) if isinstance(net.rnn, nn.LSTM) else h)[0].tanh()).sum(dim=1)


def encoder_decoder(net: Net, x: Tensor) -> Tensor:
    """The same module reads the sequence, and then its reverse, from its last states."""
    output, last = net.rnn(x)
    again, _ = net.rnn(x.flip(1), last)
    return net.head(output[:, 0] + again[:, -1])


def in_place(net: Net, x: Tensor) -> Tensor:
    output, last = net.rnn(x)
    output.tanh_()
    (last[0] if isinstance(last, tuple) else last).mul_(2.0)
    return net.head(output[:, -1]) + states((output, last))[0].sum(dim=(0, 2))[:, None]


def one_sequence(net: Net, x: Tensor) -> Tensor:
    output, last = net.rnn(x[0])
    return net.head(output[-1:]) + states((output, last))[-1].sum()


def several_sequences(net: Net, x: Tensor) -> Tensor:
    """Two sequences per sample."""
    return net.head(net.rnn(torch.stack([x, x.cos()], dim=1).flatten(end_dim=1))[0][:, -1].view(len(x), -1))


LENGTHS = torch.tensor([3, 5, 1, 4])


def packed(net: Net, x: Tensor, **options: Any) -> Tensor:
    lengths = LENGTHS.repeat(len(x))[: len(x)]
    sequences = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    returned = net.rnn(sequences)
    output, _ = pad_packed_sequence(returned[0], batch_first=True, total_length=T)
    return (
        net.head(output).squeeze(2) + sum(state.sin().sum(dim=(0, 2)) for state in states(returned))[:, None]
    )


def packed_states(net: Net, x: Tensor) -> Tensor:
    lengths = torch.tensor([5, 4, 4, 2])[: len(x)]
    h = net.embed(x[:, 0]).repeat(1, 2)[None, :, :HIDDEN].repeat(net.rnn.num_layers, 1, 1)
    given = (h, 2 * h) if isinstance(net.rnn, nn.LSTM) else h
    return net.head(states(net.rnn(pack_padded_sequence(x, lengths, batch_first=True), given))[-1][-1])


VARIANTS: dict[str, tuple[Reading, dict[str, Any]]] = {
    "last output": (last_output, {}),
    "a residual per step": (every_output, {}),
    "last states": (last_states, {}),
    "everything, twice": (everything, {}),
    "without bias": (everything, {"bias": False}),
    "two layers": (everything, {"num_layers": 2}),
    "first of two layers": (first_layer_only, {"num_layers": 2}),
    "bidirectional": (every_output, {"bidirectional": True}),
    "bidirectional, three layers": (everything, {"bidirectional": True, "num_layers": 3}),
    "time first": (time_first, {"batch_first": False}),
    "dropout, no training": (everything, {"num_layers": 2, "dropout": 0.5}),
    "given states": (given_states, {"bidirectional": True, "num_layers": 2}),
    "called twice": (encoder_decoder, {}),
    "changed in place": (in_place, {}),
    "several sequences": (several_sequences, {"bidirectional": True}),
    "packed": (packed, {}),
    "packed, bidirectional, two layers": (packed, {"bidirectional": True, "num_layers": 2}),
    "packed, given states": (packed_states, {"num_layers": 2}),
}
OF_ONE_KIND = {
    "projected": (nn.LSTM, everything, {"proj_size": 2, "bidirectional": True, "num_layers": 2}),
    "projected, packed": (nn.LSTM, packed, {"proj_size": 2}),
    "projected, given states": (nn.LSTM, given_states, {"proj_size": 2}),
    "relu": (nn.RNN, everything, {"nonlinearity": "relu"}),
}
ALL = [(kind, *variant) for variant in VARIANTS.values() for kind in KINDS.values()] + list(
    OF_ONE_KIND.values()
)
NAMES = [f"{name}: {kind}" for name in VARIANTS for kind in KINDS] + list(OF_ONE_KIND)


def problem(kind: type[nn.Module], read: Reading, b: int = B, **options: Any) -> Problem:
    torch.manual_seed(0)
    model = Net(kind, read, **{"batch_first": True, **options}).double()
    x = torch.randn(b, T, SIZE, dtype=torch.float64)
    model(x)
    return Problem(model.train(not options.get("dropout")), (x,), torch.sin)


@pytest.mark.parametrize(("kind", "read", "options"), ALL, ids=NAMES)
def test_every_variant_is_right(kind: type[nn.Module], read: Reading, options: dict[str, Any]) -> None:
    assert_right(problem(kind, read, **options), Stream().build())


class Cells(nn.Module):
    """A cell that is called for every step, first from zeros and then from states that depend on other parameters."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.cell, self.head = kind(SIZE, HIDDEN, **options), nn.Linear(HIDDEN, 2)
        self.first = nn.Linear(SIZE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            if t == 2:
                h = self.first(x[:, 0])
                state = (h, h.sin()) if self.is_pair() else h
            state = self.cell(x[:, t], state)
        if self.is_pair():
            return self.head(state[0]) + self.head(state[1])
        return self.head(state)

    def is_pair(self) -> bool:
        return isinstance(self.cell, nn.LSTMCell)


def sequences(b: int = B) -> Tensor:
    return torch.randn(b, T, SIZE, dtype=torch.float64)


CELL_VARIANTS = [
    *((kind, {}) for kind in CELLS.values()),
    (nn.LSTMCell, {"bias": False}),
    (nn.RNNCell, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("kind", "options"), CELL_VARIANTS)
@pytest.mark.parametrize("engine", [Stream(), Stream(chunk_size=3), Vmap()], ids=str)
def test_cells_are_right(kind: type[nn.Module], options: dict[str, Any], engine: Stream | Vmap) -> None:
    torch.manual_seed(0)
    assert_right(Problem(Cells(kind, **options).double(), (sequences(),), torch.sin), engine.build())


class WrittenOut(nn.Module):
    """A recurrence of linear layers, each called for every step; the last one sees each step's places turned."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(SIZE, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, read = x.new_zeros(len(x), HIDDEN), 0.0
        for t in range(x.shape[1]):
            h = torch.tanh(self.of_input(x[:, t]) + self.of_state(h))
            read = read + self.head(torch.stack([h, h.sin()])).sum(dim=0) + self.head(h)
        return read


@pytest.mark.parametrize("engine", [Stream(), Stream(chunk_size=3)], ids=str)
@pytest.mark.parametrize("frozen", [None, "of_input.weight", "head.bias"])
def test_linear_layers_that_are_called_for_every_step(engine: Stream, frozen: str | None) -> None:
    torch.manual_seed(0)
    model = WrittenOut().double()
    for name, param in model.named_parameters():
        param.requires_grad_(name != frozen)
    assert_right(Problem(model, (sequences(),), torch.sin), engine.build())


def test_a_step_of_an_unbatched_cell_or_layer_is_right_for_one_sample() -> None:
    torch.manual_seed(0)
    for kind in KINDS.values():
        assert_right(problem(kind, one_sequence, b=1), Stream().build())
    for kind in CELLS.values():
        cells = Cells(kind).double()
        cells.forward = lambda x, cells=cells: states((0, cells.cell(x[0, 0])))[0].sum()[None]
        assert_right(Problem(cells, (sequences(1),), torch.sin), Stream().build())


WAYS = [Stream(chunk_size=1), Stream(chunk_size=3), Stream(memory_budget="least"), Vmap()]


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_way_of_the_engines_is_right(kind: type[nn.Module], options: Stream | Vmap) -> None:
    own = problem(kind, everything, bidirectional=True, num_layers=2)
    assert_right(own, options.build())


@pytest.mark.parametrize("read", [everything, packed])
def test_frozen_and_tied_parameters(read: Reading) -> None:
    own = problem(nn.GRU, read, num_layers=3)
    rnn = own.model.rnn
    rnn.weight_hh_l0.requires_grad_(False)
    rnn.bias_ih_l1.requires_grad_(False)
    rnn.weight_hh_l2 = rnn.weight_hh_l1
    rnn.weight_ih_l1.requires_grad_(False)
    rnn.bias_hh_l1.requires_grad_(False)
    assert_right(own, Stream().build())


@pytest.mark.parametrize("kind", KINDS.values())
def test_wide_layers_over_few_steps_are_held_as_factors(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Net(kind, last_output, batch_first=True, num_layers=2)
    model.rnn = kind(SIZE, 40, batch_first=True, num_layers=2)
    x = torch.randn(3, 2, SIZE, dtype=torch.float64)
    model.double()(x)
    engine = Stream().build()
    assert_right(Problem(model, (x,), torch.sin), engine)
    J = of_model(model, lambda: model(x), engine)
    assert any("weight_hh" in key for key in J.jacobian.accumulated.factors)


@pytest.mark.parametrize("read", [everything, packed])
@pytest.mark.parametrize("kind", KINDS.values())
def test_dropout_between_layers_is_that_of_the_forward_pass(kind: type[nn.Module], read: Reading) -> None:
    """The masks are those that torch itself draws on a CPU, so one backward pass per row gives the same step."""
    torch.manual_seed(0)
    model = Net(kind, read, num_layers=3, dropout=0.4, bidirectional=True, batch_first=True).double()
    x = sequences()
    model(x)
    grams = []
    for options in (Stream(), Loop()):
        torch.manual_seed(1)
        grams.append(of_model(model, lambda: model(x), options.build()).gram()[0])
    assert relative_error(grams[0], grams[1]) < 1e-10


@pytest.mark.parametrize("kind", [*KINDS.values(), *CELLS.values()])
def test_float32_stays_near_float64(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind in KINDS.values()
    model = Net(kind, everything, batch_first=True, num_layers=2) if layer else Cells(kind)
    x = sequences()
    model.double()(x)
    expected = Problem(model, (x,), torch.sin).dense_jacobian()
    model.float()
    J = linearised(Problem(model, (x.float(),), torch.sin), Stream().build())
    assert relative_error(J.gram()[0], expected @ expected.T) < 1e-4


class Short(nn.Module):
    """A recurrent layer, or one call of a cell, over sequences with or without a dimension for samples."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.is_cell = kind in CELLS.values()
        self.rnn = kind(SIZE, HIDDEN) if self.is_cell else kind(SIZE, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(x[..., 0, :]) if self.is_cell else self.rnn(x)[0][..., -1, :]
        return self.head(h)


@pytest.mark.parametrize("kind", [*KINDS.values(), nn.GRUCell])
def test_terms_run_recurrent_networks(kind: type[nn.Module]) -> None:
    """The residual of a term sees one sequence; the grid of a line search evaluates it without a derivative."""
    x, found = sequences(), []
    for by_terms in (False, True):
        torch.manual_seed(0)
        model = Short(kind).double()
        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, line_search="grid")
        if by_terms:
            optimizer.step(terms=[Term(lambda u, x: u(x), x)])
        else:
            optimizer.step(lambda model=model: model(x))
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert relative_error(*found) < 1e-10


REJECTED = {
    "batch first forgotten": (lambda net, x: net.rnn(x)[0][:, -1], "pass \\[T, b, ...\\]"),
    "samples as steps": (lambda net, x: net.rnn(x[:, 0])[0], "which it takes for 1 sequences"),
}


@pytest.mark.parametrize(("read", "message"), REJECTED.values(), ids=list(REJECTED))
def test_samples_in_the_wrong_dimension_are_rejected(read: Reading, message: str) -> None:
    model = Net(nn.GRU, lambda net, x: net.head(read(net, x)), batch_first=False)
    model(torch.randn(B, T, SIZE))
    with pytest.raises(ValueError, match=message):
        of_model(model, lambda: model(torch.randn(B, T, SIZE)), Stream().build())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_torch_func_rejects_what_it_cannot_run_with_a_way_that_works() -> None:
    own = problem(nn.LSTM, packed)
    with pytest.raises(ValueError, match=r"sequences of different lengths.*use engine='stream'"):
        linearised(own, Vmap().build())


class Subclass(nn.GRU):
    """A layer without a rule."""


@pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")
@pytest.mark.parametrize("kind", [Subclass, nn.GRU])
def test_by_default_every_recurrent_network_takes_its_step(kind: type[nn.Module]) -> None:
    own = problem(kind, everything)
    if kind is nn.GRU:
        nn.utils.parametrize.register_parametrization(own.model.rnn, "weight_hh_l0", Exponential())
    assert_right(own, Stream().build())
