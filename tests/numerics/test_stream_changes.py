"""What the streaming engine keeps between steps is never used for a network that has changed since.

Each case changes a network from step to step; every step must be the one of the loop engine, which keeps nothing.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Problem
from test_optim_engines import assert_right
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from gramgn import GramGaussNewton, Stream

pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")

NUM_STEPS = 6
B = 7


class Gate(nn.Module):
    """A module without a rule, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(5))
        self.register_buffer("factor", torch.ones(5))

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(self.factor * self.g)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Net(nn.Module):
    """Has a part of every kind; `run` says how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.norm, self.gate, self.drop = nn.LayerNorm(5), Gate(), nn.Dropout(0.4)
        self.scale, self.shift = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(5))
        self.last = nn.Linear(5, 1)
        self.run: Callable[[Net, Tensor], Tensor] = everything

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.run(self, x))).flatten()


def everything(net: Net, x: Tensor) -> Tensor:
    h = net.second(torch.tanh(net.first(x)))
    return net.drop(net.norm(net.gate(net.third(torch.tanh(h)))) * net.scale + net.shift)


def hidden(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.first(x))


# Forward passes that take turns, so that the one before says nothing about the next one.
TURNS: dict[str, list[Callable[[Net, Tensor], Tensor]]] = {
    "the_other_layer": [lambda n, x: n.second(hidden(n, x)), lambda n, x: n.third(hidden(n, x))],
    "once_or_twice": [
        lambda n, x: n.second(hidden(n, x)),
        lambda n, x: n.second(torch.tanh(n.second(hidden(n, x)))),
    ],
    "other_order": [
        lambda n, x: n.third(torch.tanh(n.second(hidden(n, x)))),
        lambda n, x: n.second(torch.tanh(n.third(hidden(n, x)))),
    ],
    "plus_or_minus": [lambda n, x: hidden(n, x) + n.shift, lambda n, x: hidden(n, x) - n.shift],
    "other_place": [lambda n, x: hidden(n, x) - n.shift, lambda n, x: n.shift - hidden(n, x)],
    "factor_of_the_shift": [
        lambda n, x: torch.add(hidden(n, x), n.shift, alpha=2),
        lambda n, x: torch.add(hidden(n, x), n.shift, alpha=3),
    ],
    "scale_or_shift_first": [
        lambda n, x: hidden(n, x) * n.scale + n.shift,
        lambda n, x: (hidden(n, x) + n.shift) * n.scale,
    ],
    "shift_before_or_behind": [
        lambda n, x: n.second(hidden(n, x) + n.shift),
        lambda n, x: n.second(hidden(n, x)) + n.shift,
    ],
    "unused_in_some_steps": [lambda n, x: n.gate(hidden(n, x)), hidden],
    "a_branch_without_gradient": [
        lambda n, x: n.second(hidden(n, x)),
        lambda n, x: n.second(hidden(n, x).detach()) + hidden(n, x),
    ],
    "a_call_that_leads_nowhere": [
        lambda n, x: n.second(hidden(n, x)) + 0 * n.third(hidden(n, x)).detach(),
        lambda n, x: n.second(hidden(n, x)).detach() + n.third(hidden(n, x)),
    ],
    "places_or_none": [
        lambda n, x: n.second(hidden(n, x)),
        lambda n, x: n.second(hidden(n, x)[:, None].expand(-1, 3, -1) + torch.ones(3, 5)).mean(1),
    ],
    "samples_in_front_or_not": [
        lambda n, x: (hidden(n, x).view(len(x), 1, 5) * n.scale).view(-1, 5),
        lambda n, x: (hidden(n, x).view(5, 1, len(x)) * n.scale).view(-1, 5),
    ],
    "in_place": [
        lambda n, x: n.second(hidden(n, x)).mul(2) + n.shift,
        lambda n, x: n.second(hidden(n, x)).mul_(2).add_(n.shift),
    ],
    "a_row_of_the_shift": [
        lambda n, x: hidden(n, x) * n.shift,
        lambda n, x: hidden(n, x) * n.shift[None].expand(len(x), -1).clone(),
    ],
}


def reordered(net: Net, x: Tensor, order: Tensor) -> Tensor:
    return net.second(hidden(net, x)[order] * net.shift)[order.argsort()]


def some_tokens(net: Net, x: Tensor, *numbers: int) -> Tensor:
    taken = torch.arange(5) < torch.tensor(numbers).unsqueeze(1)
    tokens = hidden(net, x).unsqueeze(2) * net.shift
    return torch.zeros(B, 5).double().index_add(0, taken.nonzero()[:, 0], net.second(tokens[taken]))


def windows(net: Net, x: Tensor, *sizes: int) -> Tensor:
    tokens = hidden(net, x)[:, :4].unflatten(1, sizes).transpose(0, 1).reshape(-1, 1)
    return net.second(torch.tanh(tokens * net.shift)).view(sizes[0], B, sizes[1], 5).sum(dim=(0, 2))


def times_first(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    """As many times as samples; the mask [times, samples] hides which is which."""
    h = hidden(net, x)
    times = net.second(torch.linspace(-1, 1, B).double().view(-1, 1, 1) * h)
    return torch.tanh(net.second(h)) + (torch.tanh(times) * mask.double().unsqueeze(2)).sum(dim=0)


# The same operations on other data, so that the samples are in other places.
TURNS |= {
    "the_order_of_the_samples": [
        lambda n, x: reordered(n, x, torch.arange(B)),
        lambda n, x: reordered(n, x, torch.arange(B).flip(0)),
    ],
    "the_tokens_that_are_taken": [
        lambda n, x: some_tokens(n, x, 2, 2, 2, 2, 2, 2, 2),
        lambda n, x: some_tokens(n, x, 2, 2, 5, 2, 2, 0, 1),
    ],
    "dimensions_of_one": [lambda n, x: windows(n, x, 1, 4), lambda n, x: windows(n, x, 2, 2)],
    "a_mask_without_an_entry": [
        lambda n, x: times_first(n, x, torch.zeros(B, B)),
        lambda n, x: times_first(n, x, torch.ones(B, B)),
    ],
    "a_mask_with_one_entry_per_sample": [
        lambda n, x: times_first(n, x, torch.eye(B)),
        lambda n, x: times_first(n, x, torch.ones(B, B)),
    ],
}


def compared(change: Callable[[Net, int], Any], prepare: Callable[[Net], Any] = lambda net: None) -> None:
    """Step by streams and by loops; `change` is called before each step."""
    after: list[list[Tensor]] = []
    for engine in ("stream", "loop"):
        torch.manual_seed(0)
        net = Net().double()
        prepare(net)
        optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3, lr=0.5, engine=engine)
        x, y = torch.randn(B, 4).double(), torch.randn(B).double()
        after.append([])
        for step in range(NUM_STEPS):
            samples = change(net, step)
            b = samples if isinstance(samples, int) else B
            torch.manual_seed(step)
            optimizer.step(lambda net=net, x=x[:b], y=y[:b]: net(x) - y)
            after[-1].append(
                torch.cat([param.detach().flatten() for param in optimizer.param_groups[0]["params"]])
            )
    for step, (given, expected) in enumerate(zip(*after, strict=True)):
        assert torch.allclose(given, expected, rtol=1e-9, atol=1e-11), f"step {step}"


@pytest.mark.parametrize("name", TURNS)
def test_control_flow_may_differ_from_step_to_step(name: str) -> None:
    forwards = TURNS[name]
    compared(lambda net, step: setattr(net, "run", forwards[step // 2 % 2]))


def freeze(net: Net, step: int) -> None:
    net.second.weight.requires_grad_(step % 3 != 1)
    net.shift.requires_grad_(step % 3 == 0)


def switch_mode(net: Net, step: int) -> None:
    net.train(step % 3 != 1)


def replace_module(net: Net, step: int) -> None:
    kind = Doubled if step % 2 else nn.Linear
    new = kind(5, 5).double()
    new.weight, new.bias = net.second.weight, net.second.bias
    net.second = new


def replace_class(net: Net, step: int) -> None:
    net.second.__class__ = Doubled if step % 2 else nn.Linear


def replace_forward(net: Net, step: int) -> None:
    vars(net.second).pop("forward", None)
    if step % 2:
        net.second.forward = lambda x: 3 * nn.Linear.forward(net.second, x)


def replace_the_forward_of_all(net: Net, step: int) -> None:
    vars(net).pop("forward", None)
    if step % 2:
        net.forward = lambda x: Net.forward(net, x) * net.scale


def hook_output(net: Net, step: int) -> None:
    net.second._forward_hooks.clear()
    if step % 2:
        net.second.register_forward_hook(lambda module, args, output: 2 * output)


def hook_input(net: Net, step: int) -> None:
    net.second._forward_pre_hooks.clear()
    if step % 2:
        net.second.register_forward_pre_hook(lambda module, args: (args[0] ** 2,))


def tie_later(net: Net, step: int) -> None:
    if step == 2:
        net.again = nn.Linear(5, 5, bias=False)
        net.again.weight = net.second.weight
        net.run = lambda net, x: net.again(torch.tanh(everything(net, x)))


def parametrise(net: Net, step: int) -> None:
    if step == 2:
        parametrize.register_parametrization(net.second, "weight", Halved())
    if step == 4:
        parametrize.remove_parametrizations(net.second, "weight", leave_parametrized=False)


def replace_buffer(net: Net, step: int) -> None:
    net.gate.factor = torch.full((5,), 1.0 + step).double()


def add_buffer(net: Net, step: int) -> None:
    if step == 3:
        del net.gate.factor
        net.gate.register_buffer("other", torch.full((5,), 2.0).double())
        net.gate.forward = lambda h: h * torch.sigmoid(net.gate.other * net.gate.g)


def replace_data(net: Net, step: int) -> None:
    net.second.weight.data = net.second.weight.data.clone() * 1.1


def other_batch_size(net: Net, step: int) -> int:
    return (B, 5, 1)[step % 3]


def add_unused_module(net: Net, step: int) -> None:
    setattr(net, f"extra{step}", nn.Sequential(nn.Tanh()))
    if step == 3:
        del net.extra1


def merge(net: Net, step: int) -> None:
    """As an adapter of low rank is merged into its layer."""
    if step == 3:
        with torch.no_grad():
            net.second.weight += net.third.weight
    merged = step >= 3
    net.run = lambda net, x: net.second(hidden(net, x)) + (0 if merged else net.third(hidden(net, x)))


@pytest.mark.parametrize(
    "change",
    [
        freeze, switch_mode, replace_module, replace_class, replace_forward, replace_the_forward_of_all, hook_output,
        hook_input, tie_later, parametrise, replace_buffer, add_buffer, replace_data, other_batch_size,
        add_unused_module, merge,
    ],
)  # fmt: skip
def test_modules_may_change_between_steps(change: Callable[[Net, int], Any]) -> None:
    compared(change)


def test_a_closure_may_change_the_network_before_its_call() -> None:
    """What the engine keeps is compared where the network is called, not where the step begins."""
    after = []
    for engine in ("stream", "loop"):
        torch.manual_seed(0)
        net = Net().double()
        optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3, engine=engine)
        x = torch.randn(B, 4).double()

        def closure(net: Net = net, x: Tensor = x, optimizer: GramGaussNewton = optimizer) -> Tensor:
            step = optimizer.counts["steps"]
            torch.manual_seed(step)
            for change in (switch_mode, replace_forward, hook_input, replace_class):
                change(net, step)
            return net(x) - 1

        for _ in range(NUM_STEPS):
            optimizer.step(closure)
        after.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    assert torch.allclose(*after, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "forward",
    [
        lambda n, x: functional.linear(hidden(n, x), n.second.weight, n.second.bias),
        lambda n, x: hidden(n, x) * torch.sigmoid(n.gate.factor * n.gate.g),
        # The same graph as with the call of the module, which happens as well.
        lambda n, x: (
            n.gate(hidden(n, x).detach()).detach() * 0
            + hidden(n, x) * torch.sigmoid(n.gate.factor * n.gate.g)
        ),
    ],
)
def test_parameters_may_be_used_past_their_modules_in_some_steps(
    forward: Callable[[Net, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    net = Net().double()
    engine = Stream().build()
    problem = Problem(net, (torch.randn(B, 4).double(),), torch.sin)
    for run in (lambda n, x: n.gate(n.second(hidden(n, x))), forward) * 2:
        net.run = run
        assert_right(problem, engine)


def test_mixing_in_some_steps_only_is_rejected_there() -> None:
    torch.manual_seed(0)
    net = Net().double()
    optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3)
    x = torch.randn(B, 4).double()
    runs = [lambda n, x: n.gate(n.second(hidden(n, x))), lambda n, x: n.gate(hidden(n, x))]
    for right in runs:
        for _ in range(2):
            net.run = right
            optimizer.step(lambda: net(x) - 1)
        net.run = lambda n, x: n.second(hidden(n, x).T.reshape(5, -1)[:, :5]).sum() + 0 * hidden(n, x)
        before = [param.detach().clone() for param in net.parameters()]
        with pytest.raises(ValueError, match="mixes samples"):
            optimizer.step(lambda: net(x) - 1)
        assert all(map(torch.equal, before, net.parameters()))


def test_parameters_that_leave_or_join_the_network_are_rejected() -> None:
    torch.manual_seed(0)
    net = Net().double()
    optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3)
    x = torch.randn(B, 4).double()
    optimizer.step(lambda: net(x) - 1)
    third, net.third = net.third, net.second
    with pytest.raises(ValueError, match="not parameters of the model"):
        optimizer.step(lambda: net(x) - 1)
    net.third = third
    optimizer.step(lambda: net(x) - 1)
    net.new = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"does not know \(new\)"):
        optimizer.step(lambda: net(x) - 1)
    del net.new
    net.second.weight.data = net.second.weight.data.to(torch.complex128)
    with pytest.raises(ValueError, match="real floating point"):
        optimizer.step(lambda: net(x) - 1)


def test_batch_statistics_that_are_switched_on_later_are_rejected() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Flatten(0)).eval()
    optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3)
    x = torch.randn(B, 4)
    for _ in range(2):
        optimizer.step(lambda: net(x) - 1)
        net.train()
        with pytest.raises(ValueError, match="uses the statistics of the batch"):
            optimizer.step(lambda: net(x) - 1)
        net.eval()
    net[1].running_mean = None
    with pytest.raises(ValueError, match="uses the statistics of the batch"):
        optimizer.step(lambda: net(x) - 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_keep_nothing_of_the_original(copied: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), Gate(), nn.Linear(5, 1), nn.Flatten(0)).double()
    net[0] = nn.Linear(4, 5).double()
    optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3, momentum=0.9)
    x = torch.randn(B, 4).double()
    for _ in range(2):
        optimizer.step(lambda: net(x) - 1)
    other, others = copied((net, optimizer))
    for _ in range(2):
        optimizer.step(lambda: net(x) - 1)
        others.step(lambda: other(x) - 1)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    assert not any(a is b for a in net.parameters() for b in other.parameters())


def test_dtypes_may_change_between_steps() -> None:
    torch.manual_seed(0)
    net = Net().double()
    optimizer = GramGaussNewton(net, lam=1.0, alpha=0.3)
    x = torch.randn(B, 4).double()
    optimizer.step(lambda: net.eval()(x) - 1)
    same = copy.deepcopy(net).float()
    GramGaussNewton(same, lam=1.0, alpha=0.3).step(lambda: same(x.float()) - 1)
    net.float()
    optimizer.step(lambda: net(x.float()) - 1)
    assert all(map(torch.equal, net.parameters(), same.parameters()))


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(
    "change",
    [
        {"padding": (0, 2)},
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": 2},
        {"padding": (2, 2), "dilation": (2, 2)},
        {"padding": "same", "dilation": (3, 2)},
        {"stride": (1, 2)},
        {"stride": 2, "dilation": 2},
        {"padding_mode": "circular"},
        {"padding_mode": "circular", "padding": (3, 3)},
    ],
    ids=str,
)
def test_a_convolution_whose_attributes_change_after_construction(
    change: dict[str, Any], kernels: str
) -> None:
    """As of backbones that are dilated for segmentation; torch pads with zeros by what the attribute says now."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 1)
    )
    reference = copy.deepcopy(model).double()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, engine=Stream(kernels=kernels))
    by_rows = GramGaussNewton(reference, lam=1.0, alpha=0.3, engine="loop")
    for step in range(6):
        if step == 2:
            for each in (model, reference):
                vars(each[0]).update(change)
        x = torch.randn(5, 2, 9, 8)
        optimizer.step(lambda x=x: model(x) - 1.0)
        by_rows.step(lambda x=x: reference(x.double()) - 1.0)
    for param, near in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.double(), near, rtol=1e-4, atol=1e-4)
