"""Recurrent layers and cells: gradients by their gates, for which each weight is a linear layer over the steps.

A hook on a recurrent module sees the gradients of what it returned, and not those of its gates at each step. These
follow by backpropagation through time over all samples at once, from the inputs and outputs of each layer, which the
forward pass keeps. Then W_ih is a linear layer of the inputs x_t, and W_hh one of the states h_(t-1).

T steps, N sequences, H hidden units, P entries of a state (H, or `proj_size`), I entries of an input. Time leads,
[T, N, ...], and in the backward direction of a bidirectional layer each sequence is reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional
from torch.nn.modules.rnn import RNNCellBase
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from gramgn.optim.stream.blocks import LinearFactors

if TYPE_CHECKING:
    from gramgn.optim.stream.capture import Call

Grads = Mapping[int, Tensor]
"""Gradients of the tensors that a call returned, by index: output (or h), h_n and c_n (or c)."""

Pull = Callable[[Sequence[Grads]], list[LinearFactors]]
"""Takes the gradients of each call, and returns factors with the parameters' names in the module."""


@dataclass(frozen=True)
class Steps:
    """The steps of one layer in one direction, or those of several calls of a cell as one step of many sequences."""

    x: Tensor  # inputs [T, N, I]
    before: Tensor  # states before each step [T, N, P]
    cell: Tensor | None  # c before the first step [N, H], of an LSTM
    inside: Tensor | None = None  # whether a step lies inside its sequence, bool [T, N, 1]; None: all do


@dataclass(frozen=True)
class GateGradients:
    """Gradients with respect to the gates before their nonlinearities."""

    of_inputs: Tensor  # of what W_ih and b_ih yield [T, N, gates H]
    of_states: Tensor  # of what W_hh and b_hh yield [T, N, gates H]
    of_outputs: Tensor  # of the states [T, N, P]
    projected: Tensor | None = None  # what W_hr is multiplied with [T, N, H]


Through = Callable[[Tensor, Tensor | None], GateGradients]
"""Backpropagates through time: takes the gradients of the states [T, N, P] and of the last c [N, H]."""


def lstm_steps(steps: Steps, W_ih: Tensor, W_hh: Tensor, bias: Tensor | None, W_hr: Tensor | None) -> Through:
    """Return the backward pass of c' = f c + i g, h' = o tanh(c')."""
    gates = _gates(steps, W_ih, W_hh, bias).unflatten(2, (4, -1))
    i, f, g, o = gates.unbind(dim=2)
    gates[:, :, :2].sigmoid_()
    g.tanh_()
    o.sigmoid_()
    assert steps.cell is not None
    c = gates.new_empty(len(gates) + 1, *steps.cell.shape)
    c[0] = steps.cell
    cells = c.unbind()
    for old, new, forget, added in zip(cells, cells[1:], f.unbind(), (i * g).unbind(), strict=False):
        torch.addcmul(added, forget, old, out=new)
    squashed = c[1:].tanh()
    by_cell = torch.empty_like(gates[:, :, :3])
    _of_sigmoid(g, i, out=by_cell[:, :, 0])
    _of_sigmoid(c[:-1], f, out=by_cell[:, :, 1])
    _of_tanh(i, g, out=by_cell[:, :, 2])
    by_state, of_cell = _of_sigmoid(squashed, o), _of_tanh(o, squashed)
    if steps.inside is not None:
        by_cell *= steps.inside.unsqueeze(3)
        by_state, of_cell = by_state * steps.inside, of_cell * steps.inside
        f = torch.where(steps.inside, f, 1.0)

    def through(d_states: Tensor, d_cell: Tensor | None) -> GateGradients:
        D, d_states = torch.empty_like(gates), d_states.clone()
        dc = torch.zeros_like(c[0]) if d_cell is None else d_cell.clone()
        parts = (D.flatten(2), D[:, :, :3], D[:, :, 3], d_states, by_cell, by_state, of_cell, f)
        later = None
        for now in reversed(list(zip(*(part.unbind() for part in parts), strict=True))):
            of_gates, of_first, of_last, dh, slope, slope_last, slope_cell, forget = now
            if later is not None:
                dh.addmm_(later, W_hh)
            dm = dh if W_hr is None else dh @ W_hr
            dc.addcmul_(dm, slope_cell)
            torch.mul(dc.unsqueeze(1), slope, out=of_first)
            torch.mul(dm, slope_last, out=of_last)
            dc *= forget
            later = of_gates
        of_gates = D.flatten(2)
        return GateGradients(of_gates, of_gates, d_states, None if W_hr is None else o * squashed)

    return through


def gru_steps(steps: Steps, W_ih: Tensor, W_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> Through:
    """Return the backward pass of h' = (1 - z) n + z h, with n = tanh(x_n + r h_n)."""
    of_x = functional.linear(steps.x, W_ih, b_ih).unflatten(2, (3, -1))
    of_h = functional.linear(steps.before, W_hh, b_hh).unflatten(2, (3, -1))
    r, z = of_x[:, :, :2].add_(of_h[:, :, :2]).sigmoid_().unbind(dim=2)
    n = of_x[:, :, 2].addcmul_(r, of_h[:, :, 2]).tanh_()
    slope_n = _of_tanh(1 - z, n)
    slopes = torch.empty_like(of_x)
    _of_sigmoid(slope_n * of_h[:, :, 2], r, out=slopes[:, :, 0])
    _of_sigmoid(steps.before - n, z, out=slopes[:, :, 1])
    torch.mul(slope_n, r, out=slopes[:, :, 2])
    if steps.inside is not None:
        slopes *= steps.inside.unsqueeze(3)
        slope_n, z = slope_n * steps.inside, torch.where(steps.inside, z, 1.0)

    def through(d_states: Tensor, _: Tensor | None) -> GateGradients:
        D, d_states = torch.empty_like(slopes), d_states.clone()
        parts = (D, D.flatten(2), d_states, slopes, z)
        later = None
        for now in reversed(list(zip(*(part.unbind() for part in parts), strict=True))):
            of_each, of_gates, dh, slope, keep = now
            if later is not None:
                dh.addcmul_(later[0], later[1]).addmm_(later[2], W_hh)
            torch.mul(dh.unsqueeze(1), slope, out=of_each)
            later = dh, keep, of_gates
        of_inputs = D.clone()
        torch.mul(d_states, slope_n, out=of_inputs[:, :, 2])
        return GateGradients(of_inputs.flatten(2), D.flatten(2), d_states)

    return through


def rnn_steps(steps: Steps, W_ih: Tensor, W_hh: Tensor, bias: Tensor | None, *, relu: bool) -> Through:
    """Return the backward pass of h' = tanh(W_ih x + W_hh h), or of the same with a ReLU."""
    gates = _gates(steps, W_ih, W_hh, bias)
    slopes = (gates > 0).to(gates.dtype) if relu else 1 - gates.tanh_().square_()
    if steps.inside is not None:
        slopes *= steps.inside

    def through(d_states: Tensor, _: Tensor | None) -> GateGradients:
        D, d_states = torch.empty_like(slopes), d_states.clone()
        later = None
        for of_gates, dh, slope in reversed(list(zip(D, d_states, slopes, strict=True))):
            if later is not None:
                dh.addmm_(later, W_hh)
            torch.mul(dh, slope, out=of_gates)
            later = of_gates
        return GateGradients(D, D, d_states)

    return through


def _gates(steps: Steps, W_ih: Tensor, W_hh: Tensor, bias: Tensor | None) -> Tensor:
    """Return W_ih x + W_hh h + bias, [T, N, gates H]."""
    gates = functional.linear(steps.x, W_ih, bias)
    gates.flatten(end_dim=1).addmm_(steps.before.flatten(end_dim=1), W_hh.T)
    return gates


def _of_sigmoid(grad: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return grad y (1 - y)."""
    result = torch.empty_like(grad) if out is None else out
    return torch.ops.aten.sigmoid_backward(grad, y, grad_input=result)


def _of_tanh(grad: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return grad (1 - y^2)."""
    result = torch.empty_like(grad) if out is None else out
    return torch.ops.aten.tanh_backward(grad, y, grad_input=result)


def _through(module: nn.Module, steps: Steps, suffix: str) -> Through:
    """Return the backward pass of the steps with the parameters whose names end in `suffix`."""
    W_ih, W_hh, b_ih, b_hh, W_hr = (
        None if (param := module._parameters.get(name + suffix)) is None else param.detach()
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    )
    assert W_ih is not None
    assert W_hh is not None
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return gru_steps(steps, W_ih, W_hh, b_ih, b_hh)
    bias = None if b_ih is None or b_hh is None else b_ih + b_hh
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return lstm_steps(steps, W_ih, W_hh, bias, W_hr)
    return rnn_steps(steps, W_ih, W_hh, bias, relu=cast(Any, module).nonlinearity == "relu")


@dataclass(frozen=True)
class Layer:
    """What one layer was given and returned, detached, in the layout of the call."""

    x: Tensor | PackedSequence
    output: Tensor | PackedSequence
    mask: Tensor | PackedSequence | None  # what dropout multiplied the last layer's output by to get x


def run_layers(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Layer]]:
    """Call a recurrent layer; return what it returned, and its layers.

    Several layers are run one after the other, since the module itself does not show what passes between them.
    """
    layer = cast(nn.RNNBase, module)
    x, hx = _arguments(*args, **kwargs)
    num_directions = 2 if layer.bidirectional else 1
    states = hx if isinstance(hx, tuple) else (hx,)
    fits = hx is None or all(len(state) == num_directions * layer.num_layers for state in states)
    if layer.num_layers == 1 or not fits:  # which torch rejects
        returned = forward(*args, **kwargs)
        return returned, [Layer(_detached(x), _detached(returned[0]), None)]
    layers, last, mask = [], [], None
    for number in range(layer.num_layers):
        if number and layer.dropout and layer.training:
            data = x.data if isinstance(x, PackedSequence) else x
            noise = functional.dropout(torch.ones_like(data), layer.dropout)
            mask, x = _like(x, noise), _like(x, data * noise)
        part = slice(num_directions * number, num_directions * (number + 1))
        given = None if hx is None else tuple(state[part] for state in states)
        one = _single_layer(layer, number, num_directions)
        output, state = type(layer).forward(
            one, x, given if given is None or layer.mode == "LSTM" else given[0]
        )
        layers.append(Layer(_detached(x), _detached(output), mask))
        last.append(state)
        x = output
    if layer.mode == "LSTM":
        return (x, tuple(torch.cat(parts) for parts in zip(*last, strict=True))), layers
    return (x, torch.cat(last)), layers


def _single_layer(module: nn.RNNBase, number: int, num_directions: int) -> Any:
    """Return a module of one of the layers, with the very parameters of the whole."""
    one = object.__new__(type(module))
    count = len(module._flat_weights) // module.num_layers
    part = slice(count * number, count * (number + 1))
    size = (module.proj_size or module.hidden_size) * num_directions if number else module.input_size
    vars(one).update(
        vars(module),
        num_layers=1,
        input_size=size,
        dropout=0.0,
        _flat_weights_names=module._flat_weights_names[part],
        _flat_weights=module._flat_weights[part],
        _flat_weight_refs=module._flat_weight_refs[part],
    )
    return one


def check_sequences(call: Call, b: int) -> None:
    """Reject a call whose sequences do not belong to the samples."""
    x, _ = _arguments(*call.args, **call.kwargs)
    module, by_step = call.owner.module, False
    if isinstance(module, RNNCellBase):
        num_sequences = len(x) if x.ndim == 2 else 1
    elif isinstance(x, PackedSequence):
        num_sequences = int(x.batch_sizes[0])
    else:
        by_step = not cast(nn.RNNBase, module).batch_first
        num_sequences = x.shape[1 if by_step else 0] if x.ndim == 3 else 1
    if num_sequences % b:
        raise ValueError(
            f"{call.owner} was called with {list(x.data.shape)}, which it takes for {num_sequences} sequences, inside "
            f"a network called with {b} samples: each sample must have its own sequences"
            + (". With batch_first=False they are in dimension 1: pass [T, b, ...]" if by_step else "")
        )


def pull_layers(module: nn.Module, calls: Sequence[Call], b: int) -> Pull:
    """Return what computes the factors of all calls of an `nn.LSTM`, `nn.GRU` or `nn.RNN`."""
    several = [CalledLayers(cast(nn.RNNBase, module), call) for call in calls]

    def pull(grads: Sequence[Grads]) -> list[LinearFactors]:
        found: dict[str, list[tuple[Steps, GateGradients]]] = {}
        for of_call, given in zip(several, grads, strict=True):
            for suffix, of_steps in of_call.pull(given):
                found.setdefault(suffix, []).append(of_steps)
        return [each for suffix, parts in found.items() for each in _factors(parts, suffix, b)]

    return pull


class CalledLayers:
    """One call of a recurrent layer, prepared for any number of backward passes."""

    def __init__(self, module: nn.RNNBase, call: Call) -> None:
        self.module, self.layers = module, cast(list[Layer], call.kept)
        self.size, self.dtype = (
            module.proj_size or module.hidden_size,
            cast(Tensor, module.weight_ih_l0).dtype,
        )
        self.directions = ("", "_reverse") if module.bidirectional else ("",)
        self.lengths: Tensor | None = None
        if isinstance(self.layers[0].x, PackedSequence):
            self.lengths = pad_packed_sequence(self.layers[0].x)[1].to(self.layers[0].x.data.device)
        _, hx = _arguments(*call.args, **call.kwargs)
        states = hx if hx is None or isinstance(hx, tuple) else (hx,)
        self.masks = [None if layer.mask is None else self._time_first(layer.mask) for layer in self.layers]
        self.parts: list[list[tuple[str, Steps, Through]]] = []
        for number, layer in enumerate(self.layers):
            x, output = self._time_first(layer.x), self._time_first(layer.output)
            inside = None if self.lengths is None else _inside(self.lengths, len(x))
            zeros = x.new_zeros(x.shape[1], module.hidden_size)
            parts = []
            for place, suffix in enumerate(self.directions):
                at = number * len(self.directions) + place
                h0, c0 = zeros[:, : self.size], zeros
                if states is not None:
                    h0, c0 = (_with_sequences(state)[at].to(self.dtype) for state in (states[0], states[-1]))
                after = self._turned(output[..., self._part(place)], suffix)
                before = torch.cat([h0[None], after[:-1]])
                steps = Steps(self._turned(x, suffix), before, c0 if module.mode == "LSTM" else None, inside)
                name = f"_l{number}{suffix}"
                parts.append((name, steps, _through(module, steps, name)))
            self.parts.append(parts)

    def pull(self, grads: Grads) -> list[tuple[str, tuple[Steps, GateGradients]]]:
        """Return the gradients of the gates of each layer and direction, from the last layer to the first."""
        d_last = {place: _with_sequences(grads[place]).to(self.dtype) for place in (1, 2) if place in grads}
        d_output = self._time_first(_like(self.layers[-1].output, grads[0])) if 0 in grads else None
        found = []
        for number in reversed(range(len(self.layers))):
            d_inputs: list[Tensor] = []
            for place, (suffix, (name, steps, through)) in enumerate(
                zip(self.directions, self.parts[number], strict=True)
            ):
                at, (T, N) = number * len(self.directions) + place, steps.x.shape[:2]
                if d_output is None:
                    d_states = steps.x.new_zeros(T, N, self.size)
                else:
                    d_states = self._turned(d_output[..., self._part(place)], suffix).clone()
                if 1 in d_last:
                    ends = T - 1 if self.lengths is None else (self.lengths - 1, torch.arange(N))
                    d_states[ends] += d_last[1][at]
                of_gates = through(d_states, d_last[2][at] if 2 in d_last else None)
                found.append((name, (steps, of_gates)))
                if number:
                    W_ih = cast(Tensor, self.module._parameters["weight_ih" + name]).detach()
                    d_inputs.append(self._turned(of_gates.of_inputs @ W_ih, suffix))
            if number:
                d_output, mask = sum(d_inputs[1:], d_inputs[0]), self.masks[number]
                d_output = d_output if mask is None else d_output * mask
        return found

    def _part(self, place: int) -> slice:
        """Return the entries of a layer's output that belong to one direction."""
        return slice(place * self.size, (place + 1) * self.size)

    def _time_first(self, x: Tensor | PackedSequence) -> Tensor:
        """Return sequences as [T, N, ...]."""
        if isinstance(x, PackedSequence):
            x, _ = pad_packed_sequence(x)
        elif x.ndim == 2:
            x = x.unsqueeze(1)
        elif self.module.batch_first:
            x = x.transpose(0, 1)
        return x.to(self.dtype)

    def _turned(self, x: Tensor, suffix: str) -> Tensor:
        """Return sequences [T, N, ...] in the direction of time in which they are run, or back."""
        if not suffix:
            return x
        if self.lengths is None:
            return x.flip(0)
        t = torch.arange(len(x), device=x.device)[:, None]
        t = torch.where(t < self.lengths, self.lengths - 1 - t, t)
        return x[t, torch.arange(x.shape[1], device=x.device)]


def pull_cells(module: nn.Module, calls: Sequence[Call], b: int) -> Pull:
    """Return what computes the factors of all calls of a cell at once: autograd goes from one call to the next."""
    dtype = cast(Tensor, module.weight_ih).dtype
    size = cast(RNNCellBase, module).hidden_size

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors [sequences, ...] of all calls as [1, N, ...], sample by sample."""
        parts = [tensor.reshape(b, -1, tensor.shape[-1]).to(dtype) for tensor in tensors]
        return torch.cat(parts, dim=1).flatten(end_dim=1)[None]

    xs, hs, cs = [], [], []
    for call in calls:
        x, hx = _arguments(*call.args, **call.kwargs)
        h, *c = hx if isinstance(hx, tuple) else (x.new_zeros(*x.shape[:-1], size) if hx is None else hx,)
        xs.append(x)
        hs.append(h)
        cs.append(c[0] if c else torch.zeros_like(h))
    cell = joined(cs)[0] if isinstance(module, nn.LSTMCell) else None
    steps = Steps(joined(xs), joined(hs), cell)
    through = _through(module, steps, "")

    def pull(grads: Sequence[Grads]) -> list[LinearFactors]:
        d_state, d_cell = (
            joined(
                [
                    given.get(place, zeros)
                    for given, zeros in zip(grads, map(torch.zeros_like, hs), strict=True)
                ]
            )
            for place in (0, 1)
        )
        return _factors([(steps, through(d_state, d_cell[0]))], "", b)

    return pull


def _factors(parts: Sequence[tuple[Steps, GateGradients]], suffix: str, b: int) -> list[LinearFactors]:
    """Return the factors of the parameters whose names end in `suffix`, of all calls together."""

    def joined(get: Callable[[Steps, GateGradients], Tensor]) -> Tensor:
        """Return tensors [T, N, ...] of each call as [b, places, ...]."""
        tensors = [get(*part) for part in parts]
        places = [tensor.transpose(0, 1).reshape(b, -1, tensor.shape[-1]) for tensor in tensors]
        return torch.cat(places, dim=1) if len(places) > 1 else places[0]

    found = [
        LinearFactors(
            joined(lambda steps, _: steps.x),
            joined(lambda _, grads: grads.of_inputs).unsqueeze(1),
            "weight_ih" + suffix,
            "bias_ih" + suffix,
        ),
        LinearFactors(
            joined(lambda steps, _: steps.before),
            joined(lambda _, grads: grads.of_states).unsqueeze(1),
            "weight_hh" + suffix,
            "bias_hh" + suffix,
        ),
    ]
    if parts[0][1].projected is not None:
        A = joined(lambda _, grads: cast(Tensor, grads.projected))
        D = joined(lambda _, grads: grads.of_outputs).unsqueeze(1)
        found.append(LinearFactors(A, D, "weight_hr" + suffix, None))
    return found


def is_known(module: nn.Module) -> bool:
    """Return whether the module's weights are its own parameters, and not computed from others before each call."""
    if isinstance(module, nn.RNNBase):
        return all(name in module._parameters for name in module._flat_weights_names)
    return all(name in module._parameters for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))


@contextmanager
def states_of_one_sample(model: nn.Module) -> Iterator[None]:
    """Let `torch.func.vmap` run the recurrent modules of a model.

    They change what they compute from the input in place by what they compute from the state. That fails where one of
    the two is the same for all samples, as states are that start at zero.
    """
    modules = [module for module in model.modules() if isinstance(module, (nn.RNNBase, RNNCellBase))]
    own = [(vars(module), vars(module).get("forward")) for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = _of_one_sample(module, module.forward)
        yield
    finally:
        for attributes, forward in own:
            del attributes["forward"]
            if forward is not None:
                attributes["forward"] = forward


def _of_one_sample(module: nn.RNNBase | RNNCellBase, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        x, hx = _arguments(*args, **kwargs)
        if not isinstance(x, Tensor):
            return forward(x, hx)
        given = [part for part in pytree.tree_leaves((x, hx)) if part is not None]
        zero = torch.stack([torch.zeros_like(part.reshape(-1)[0]) for part in given]).sum()
        if hx is None and isinstance(module, nn.RNNBase):
            num_states = module.num_layers * (2 if module.bidirectional else 1)
            shape = (num_states, *([x.shape[0 if module.batch_first else 1]] if x.ndim == 3 else []))
            h = zero.expand(*shape, module.proj_size or module.hidden_size)
            hx = (h, zero.expand(*shape, module.hidden_size)) if module.mode == "LSTM" else h
        elif hx is None:
            h = zero.expand(*x.shape[:-1], module.hidden_size)
            hx = (h, h) if isinstance(module, nn.LSTMCell) else h
        x, hx = x + zero, pytree.tree_map(lambda state: state + zero, hx)
        # torch.func has no rule for oneDNN's layer, which it would run sample by sample.
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            transform = torch._C._functorch.peek_interpreter_stack()
            if transform is not None and transform.key() == torch._C._functorch.TransformType.Vmap:
                # Only where something is differentiated does it take the layers apart.
                return vjp(lambda x: forward(x, hx), x)[0]
            return forward(x, hx)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    return run


def _arguments(input: Any, hx: Any = None) -> tuple[Any, Any]:  # torch's name
    """Return the arguments of a recurrent module."""
    return input, hx


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else _like(x, x.data.detach())


def _like(x: Tensor | PackedSequence, data: Tensor) -> Any:
    """Return data as a packed sequence if x is one."""
    if isinstance(x, Tensor):
        return data
    return PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices)


def _with_sequences(states: Tensor) -> Tensor:
    """Return the states of all layers as [layers, N, ...], also those of a single sequence."""
    return states.unsqueeze(1) if states.ndim == 2 else states


def _inside(lengths: Tensor, T: int) -> Tensor:
    """Return whether each step lies inside its sequence, [T, N, 1]."""
    return (torch.arange(T, device=lengths.device)[:, None] < lengths)[:, :, None]
