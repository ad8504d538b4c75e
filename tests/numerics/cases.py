"""One table of networks with data in float64, over which the tests of the optimizer's mathematics run.

b samples, q outputs per sample, k residuals per sample, m trainable parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock

from gramgn.models import ResNetBN, ResNetFixup, ResNetGN
from gramgn.optim import Linearisation, Trained


@dataclass(frozen=True)
class Case:
    """A network, the arguments of its call, and the residuals of its output.

    Attributes:
        name: The name of the case.
        build: Returns the network.
        inputs: Returns the arguments of the call.
        residual: Maps the output to the residuals; None: the output minus random targets of its shape.
        vmap: Whether `torch.func.vmap` can run the network; it lacks some in-place operations.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    residual: Callable[[Tensor], Tensor] | None = None
    vmap: bool = True

    def make(self) -> Problem:
        """Return the case with fixed random numbers and all parameters moved away from special values."""
        torch.manual_seed(0)
        model = self.build().double()
        with torch.no_grad():
            for param in model.parameters():
                fan_in = param[0].numel() if param.ndim else 1
                param.add_(0.3 * torch.randn_like(param) / fan_in**0.5)
        args = self.inputs()
        with torch.no_grad():
            target = torch.randn_like(model(*args))
        return Problem(model, args, self.residual or (lambda output: output - target))

    @cache  # noqa: B019  # one Jacobian per case, shared by all tests of a run
    def jacobian(self) -> Tensor:
        """Return J [b k, m] of the problem as it is made."""
        return self.make().dense_jacobian()


@dataclass(frozen=True)
class Problem:
    """A network with data. The networks and data of the table are in float64."""

    model: nn.Module
    args: tuple[Tensor, ...]
    residual: Callable[[Tensor], Tensor]

    def closure(self) -> Tensor:
        """Return the residuals, as a user's closure does."""
        return self.residual(self.model(*self.args))

    def trained(self, num_groups: int = 1) -> Trained:
        """Return the parameters that require gradients, dealt out to groups in turn."""
        return all_trained(self.model, num_groups)

    def flat(self) -> Tensor:
        """Return a copy of the trainable parameters as one vector [m]."""
        return torch.cat([param.detach().flatten().clone() for param in self.trained().params.values()])

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a vector [m] in the parameters' shapes."""
        params = list(self.trained().params.values())
        parts = flat.split([param.numel() for param in params])
        return [part.view_as(param) for part, param in zip(parts, params, strict=True)]

    def residual_at(self, flat: Tensor) -> Tensor:
        """Return the residuals, flattened, with the trainable parameters replaced by `flat` [m]."""
        state = dict(zip(self.trained().params, self.split(flat), strict=True))
        return self.residual(functional_call(self.model, state, self.args)).flatten()

    def dense_jacobian(self) -> Tensor:
        """Return J [b k, m] of the whole batch, free to mix samples, without an engine's code."""
        return torch.autograd.functional.jacobian(self.residual_at, self.flat())


def all_trained(model: nn.Module, num_groups: int = 1) -> Trained:
    """Return the parameters that require gradients, dealt out to groups in turn."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return Trained(params, tuple(i % num_groups for i in range(len(params))), num_groups)


def vjp(J: Linearisation, trained: Trained, u: Tensor) -> list[Tensor]:
    """Return J^T u in the parameters' shapes."""
    out = [torch.zeros_like(param) for param in trained.params.values()]
    J.add_vjp_(out, u, [1.0] * len(out))
    return out


def flattened(parts: Iterable[Tensor]) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([part.flatten() for part in parts])


def relative_error(given: Tensor, expected: Tensor) -> float:
    """Return |given - expected| / |expected|."""
    return float((given - expected).norm() / expected.norm())


def leaves_no_tensor_behind(run: Callable[[], None], times: int) -> bool:
    """Return whether Python holds as many new tensors after `times` calls as after twice as many."""
    run()
    gc.collect()
    gc.freeze()  # Only objects made from here on are looked at.
    try:
        counts = []
        for _ in range(2):
            for _ in range(times):
                run()
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    finally:
        gc.unfreeze()
    return counts[0] == counts[1]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(model: nn.Module) -> bool:
    """Return whether a module of the network has a hook."""
    return any(getattr(module, hooks) for module in model.modules() for hooks in HOOKS)


class UsedTwice(nn.Module):
    """One linear layer applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x))))).squeeze(1)


class Tied(nn.Module):
    """Two layers that share one weight, so that it has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Functional(nn.Module):
    """Parameters without a layer, used by functions; among them a scalar bias and a scalar scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 5))
        self.bias, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.linear(torch.tanh(x + self.bias), self.weight)


class Tokens(nn.Module):
    """Embedding, layer normalisation over a sequence, a shared second input; squeezes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.last((self.norm(self.embedding(tokens)) * scale).mean(dim=1)).squeeze()


class Masked(nn.Module):
    """Two inputs with one entry per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x * mask[:, None])


def small_mlp(num_outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, num_outputs))


def frozen_first() -> nn.Module:
    model = small_mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.InstanceNorm2d(4, affine=True),
        nn.PReLU(4),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.LazyLinear(1),
    )


def initialised_convolutions() -> nn.Module:
    model = convolutions()
    model(torch.randn(1, 2, 8, 8))
    return model


def sequence() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(15, 2))


class Exponential(nn.Module):
    """Makes a weight positive."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.exp()


def parametrised() -> nn.Module:
    model = small_mlp()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Exponential())
    return model


def torchvision_block() -> nn.Module:
    """A residual block of torchvision with group normalisation: its ReLUs and its sum act in place."""
    block = BasicBlock(3, 3, norm_layer=lambda channels: nn.GroupNorm(3, channels))
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), block, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 1)
    )


def frozen_batch_norm() -> nn.Module:
    model = ResNetBN(8, width=4, in_channels=1)
    model(torch.randn(16, 1, 8, 8))
    return model.eval()


def padded_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(5, 6, 3, padding="same", padding_mode="circular"),
        nn.Tanh(),
        nn.Conv2d(6, 6, (3, 2), padding=(1, 2), padding_mode="replicate", groups=3),
        nn.Tanh(),
        nn.Conv2d(6, 5, (3, 5), padding="same", dilation=(1, 2)),
        nn.Tanh(),
        nn.Conv2d(5, 5, 3, stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=5),
        nn.Tanh(),
        nn.Conv2d(5, 1, (11, 6), bias=False),
        nn.Flatten(),
    )


def strided_columns() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 3)),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, padding="valid", padding_mode="reflect"),
        nn.Flatten(),
        nn.LazyLinear(2),
    )


def built(build: Callable[[], nn.Module], *shape: int) -> Callable[[], nn.Module]:
    def build_and_call() -> nn.Module:
        model = build()
        model(torch.randn(2, *shape))
        return model

    return build_and_call


class ConvolutionTwice(nn.Module):
    """One convolution applied twice, its weight tied to a third, on planes of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(self.layer(x).relu_()).tanh_()).mean(dim=(2, 3))


class InPlace(nn.Module):
    """In-place operations on outputs of layers, including views, and on sums and products with scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.bias, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu_() + self.bias
        x = self.middle(x).add_(self.bias).mul_(self.scale).sigmoid_()
        x = 2 - torch.sub(x, self.bias, alpha=3.0)
        return self.last(x.mean(dim=1)).sub_(self.bias)


class MergedWeights(nn.Module):
    """Weights that are scaled, masked and added to others before they are used, as many rows as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.ones(1))
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 5))
        self.gains = nn.Parameter(torch.ones(4, 1))
        self.last = nn.Linear(4, 1)
        self.register_buffer("mask", torch.eye(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale * self.weight + self.gains * (self.left @ self.right) + self.weight * self.mask
        return self.last(torch.tanh(nn.functional.linear(x, weight)))


class Attention(nn.Module):
    """Self-attention, which reads the parameters of its projection without calling it, and returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, weights = self.attention(x, x, x)
        return self.last(x[:, 0]) + weights.square().sum(dim=(1, 2))[:, None]


class OutsideTheLayers(nn.Module):
    """A container with its own parameters next to its layers; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = UsedTwice()
        self.weight, self.idle = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3))
        self.powers = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.layer(x @ self.weight) * self.powers[0]
        return self.inner(torch.tanh(x)) + (x.cosh() ** self.powers[1]).sum(dim=1)


class Scalars(nn.Module):
    """Parameters without dimensions, in expressions without dimensions and as factors and summands of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.scale, self.shift, self.power = (nn.Parameter(torch.tensor(0.5)) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * (1 + self.scale) + 2 * self.shift * self.shift
        return torch.tanh(x * (3 - self.gain) - self.shift) * (self.power * self.scale).exp()


class PaddedTokens(nn.Module):
    """Embeddings of repeated and padding tokens, added to a table of positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(7, 4, padding_idx=0), nn.Parameter(torch.randn(3, 4))
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.tanh(self.embedding(tokens) + self.positions)).sum(dim=(1, 2))


class CrossAttention(nn.Module):
    """Attention to keys and values of other sizes, with all biases and masks; the time leads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            4, 2, kdim=3, vdim=5, add_bias_kv=True, add_zero_attn=True, dropout=0.5
        ).eval()
        self.keys, self.values, self.last = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(4, 2)
        self.register_buffer("mask", torch.rand(2, 2, 3))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask, keys, values = self.mask.repeat(len(x), 1, 1), self.keys(x), self.values(x)
        x, keys, values = (each.transpose(0, 1) for each in (x[:, :2], keys, values))
        x, _ = self.attention(x, keys, values, key_padding_mask=padding, attn_mask=mask, need_weights=False)
        return self.last(x.transpose(0, 1)).sum(dim=1)


class Translation(nn.Module):
    """Torch's decoder over as many times as samples, which are in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0)
        self.decoder, self.last = nn.TransformerDecoder(layer, 1, nn.LayerNorm(4)), nn.Linear(4, 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
        return self.last(self.decoder(y, x, tgt_mask=self.mask.to(x), tgt_is_causal=True))[0]


class Recurrent(nn.Module):
    """A recurrent layer, over packed sequences if lengths are given; read at every step and at its last states."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(3, 3), kind(3, 4, batch_first=True, **options)
        self.last = nn.Linear(8 if self.rnn.bidirectional else 4, 1)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        if lengths is None:
            output, states = self.rnn(x)
        else:
            output, states = self.rnn(
                pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            )
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        states = torch.cat(states, dim=2) if isinstance(states, tuple) else states
        return self.last(output).squeeze(2) + states.transpose(0, 1).sin().sum(dim=(1, 2))[:, None]


class Cells(nn.Module):
    """A cell that is called for every step; both of its results are read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = None
        for t in range(x.shape[1]):
            states = self.cell(x[:, t], states)
        return self.last(states[0]) + self.last(states[1]).sin()


class ImageTokens(nn.Module):
    """A class token, a table of positions, layer scale and learned temperature, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Embedding(6, 4)
        self.mixed, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.temperature, self.last = nn.Parameter(torch.tensor(0.3)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.positions(torch.arange(x.shape[1]))
        weights = (x @ x.mT / self.temperature.exp()).softmax(dim=-1)
        return self.last((x + self.scale * torch.tanh(self.mixed(weights @ x)))[:, 0])


class LearnedQueries(nn.Module):
    """Queries that are parameters, normalised without a sample, attend to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.norm = nn.Parameter(torch.randn(1, 2, 4)), nn.LayerNorm(4)
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(self.queries).expand(len(x), -1, -1)
        return self.last(self.attention(queries, x, x, need_weights=False)[0].tanh().mean(dim=1))


class Operator(nn.Module):
    """A trunk that is called on points which all samples share, multiplied by a branch, as in a DeepONet."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.trunk = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("points", torch.linspace(-1, 1, 4)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bp,kp->bk", self.branch(x), self.trunk(self.points)) + self.bias


class FoldedTime(nn.Module):
    """Times of all samples as one batch, in both orders, in front of layers that know of no time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2)
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, times = x.shape[:2]
        x = torch.tanh(self.norm(self.conv(x.flatten(0, 1)))).view(b, times, 8)
        x = torch.tanh(self.first(x.transpose(0, 1).reshape(times * b, 8)))
        return self.last(x.view(times, b, 4).mean(dim=0))


class TimeFirst(nn.Module):
    """Samples in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)
        self.embedding, self.last = nn.Embedding(7, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.layer(self.embedding(tokens.T))).sum(dim=(0, 2))


class DecomposedWeight(nn.Module):
    """A weight of a learned length in each row and a low-rank change, as in DoRA, with as many rows as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.length = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.ones(4, 1))
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 5))
        self.gains, self.slope = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.eye(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.left @ self.right
        weight = self.length * weight / weight.norm(dim=1, keepdim=True) + self.gains * self.mask
        return nn.functional.prelu(nn.functional.linear(x, weight), 2 * self.slope).sum(dim=1)


class Bags(nn.Module):
    """Tables whose entries are summed, averaged and compared in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(7, 4, mode=mode) for mode in ("sum", "mean", "max"))
        self.last = nn.Linear(4, 2)
        self.register_buffer("weights", torch.rand(3))

    def forward(self, tokens: Tensor) -> Tensor:
        first, second, third = self.tables
        x = first(tokens, per_sample_weights=self.weights.expand(len(tokens), -1))
        starts = torch.arange(0, tokens.numel(), tokens.shape[1])
        return self.last(torch.tanh(x + second(tokens.flatten(), starts) + third(tokens)))


class Recomputed(nn.Module):
    """Layers and parameters under checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 1)
        self.factor, self.divisor, self.scale = (nn.Parameter(torch.ones(n)) for n in (5, 5, 1))

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * self.factor) / self.divisor) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inside, x, use_reentrant=False))


class Frames(nn.Module):
    """Convolutions by functions with standardised weights, and sums and products, over frames folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 1, 3, 3)), nn.Parameter(torch.randn(4))
        self.gain, self.shift = nn.Parameter(torch.randn(1, 4, 1, 1)), nn.Parameter(torch.randn(4, 1, 1))
        self.other = nn.Parameter(torch.randn(4, 1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.std(dim=(1, 2, 3), keepdim=True)
        y = nn.functional.conv2d(x.flatten(end_dim=1), weight, self.bias, padding=1, groups=2)
        y = torch.sub(self.gain * y.tanh(), self.shift, alpha=2.0)
        y = nn.functional.conv_transpose2d(y.tanh(), self.other, stride=2, groups=2)
        return y.unflatten(0, (len(x), -1)).tanh().sum(dim=(1, 3, 4))


class Shrinking(nn.Module):
    """A cell written out that runs on the sequences that have not ended, sorted by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        x, lengths, h = x[order], lengths[order], x.new_zeros(len(x), 4)
        for t in range(int(lengths[0])):
            n = int((lengths > t).sum())
            h = torch.cat([torch.tanh(self.first(x[:n, t]) + self.cell(h[:n])), h[n:]])
        return self.last(h * self.gain)[order.argsort()]


class Rotations(nn.Module):
    """Complex numbers made from parameters, as factors of activations, in products with them, and by a real gain."""

    def __init__(self) -> None:
        super().__init__()
        self.angles, self.gains = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.modes, self.last = nn.Parameter(torch.randn(3, 4, 2)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.polar(self.gains.exp(), self.angles) * self.gains
        return self.last((spectrum @ torch.view_as_complex(self.modes)).abs()).squeeze(1)


class Functions(nn.Module):
    """Normalisations by functions, repeated tokens, and tables read by `index_select`; data decide on the flow."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.token, self.table = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        read = self.table.index_select(0, (x > 0).sum(dim=2).flatten()).view(x.shape)
        x = torch.cat([x + read, self.token.repeat(len(x), 2, 1)], dim=1)
        x = nn.functional.layer_norm(x, (4,), self.gain, self.shift).transpose(1, 2)
        x = nn.functional.group_norm(torch.tanh(x), 2, self.shift, self.gain).transpose(1, 2)
        x[x[:, :, 0] > 0] = self.token[0].sin()
        return torch.cdist(x, self.table).sum(dim=(1, 2)) / self.gain.exp().sum()


class Cubed(torch.autograd.Function):
    """A user-defined function that `torch.func` cannot run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, factor = ctx.saved_tensors
        return 3 * grad * factor * x**2, (grad * x**3).sum(dim=0)


class Forces(nn.Module):
    """An energy and its derivative by the input, which is taken in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)
        self.factor = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(torch.tanh(self.norm(self.first(x))))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, Cubed.apply(self.first(force), self.factor)], dim=1)


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=2, dilation=2, groups=2, padding_mode="reflect"),
        nn.InstanceNorm1d(4, affine=True),
        nn.LayerNorm([4, 5]),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.LayerNorm(20, bias=False),
        nn.Linear(20, 1),
    )


def unknown_layers() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 3, 3),
        nn.PReLU(3),
        nn.Flatten(2),
        nn.Linear(16, 2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def padded_sequences() -> tuple[Tensor, ...]:
    padding = torch.zeros(4, 3, dtype=torch.float64)
    padding[1:, 2] = -torch.inf
    return torch.randn(4, 3, 4, dtype=torch.float64), padding


def vectors(b: int = 6, size: int = 5) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(b, size, dtype=torch.float64),)


def images(b: int = 5, channels: int = 1, size: int = 8) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(b, channels, size, size, dtype=torch.float64),)


def sequences(b: int = 4, num_steps: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(b, num_steps, 3, dtype=torch.float64),)


def tokens() -> tuple[Tensor, ...]:
    return torch.randint(0, 7, (6, 3)), torch.rand(4, dtype=torch.float64)


def masked() -> tuple[Tensor, ...]:
    return torch.randn(6, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)


CASES = (
    Case("linear", lambda: nn.Linear(5, 1), vectors()),
    Case("mlp", small_mlp, vectors()),
    Case("mlp_one_sample", small_mlp, vectors(b=1)),
    Case("mlp_three_outputs", lambda: small_mlp(3), vectors()),
    Case("mlp_three_outputs_one_sample", lambda: small_mlp(3), vectors(b=1)),
    Case("mlp_weighted", lambda: small_mlp(2), vectors(), lambda f: f * torch.tensor([0.5, 3.0]).to(f) - 1),
    Case("mlp_fewer_residuals", lambda: small_mlp(3), vectors(), lambda f: f.square().sum(dim=1) - 1),
    Case("mlp_curved", small_mlp, vectors(), lambda f: f.squeeze(1).exp() - 2),
    Case("frozen_parameters", frozen_first, vectors()),
    Case("used_twice", UsedTwice, vectors(size=4)),
    Case("tied_weights", Tied, vectors(size=4)),
    Case("functional_parameters", Functional, vectors()),
    Case("tokens", Tokens, tokens),
    Case("masked", Masked, masked),
    Case("convolutions", initialised_convolutions, images(channels=2)),
    Case("sequence", sequence, lambda: (torch.randn(5, 2, 5, dtype=torch.float64),)),
    Case("parametrised", parametrised, vectors()),
    Case("frozen_batch_norm", frozen_batch_norm, images()),
    Case("resnet_fixup", lambda: ResNetFixup(8, width=4, in_channels=1), images()),
    Case(
        "resnet_fixup_two_outputs", lambda: ResNetFixup(8, width=2, in_channels=1, num_outputs=2), images(b=3)
    ),
    Case("padded_convolutions", padded_convolutions, images(b=3, channels=5, size=11)),
    Case("padded_convolutions_one_sample", padded_convolutions, images(b=1, channels=5, size=11)),
    Case("strided_columns", built(strided_columns, 2, 8, 8), images(channels=2)),
    Case("convolution_twice", ConvolutionTwice, images(channels=2)),
    Case("in_place", InPlace, lambda: (torch.randn(4, 3, 4, dtype=torch.float64),), vmap=False),
    Case("merged_weights", MergedWeights, vectors(b=4)),
    Case("attention", Attention, lambda: (torch.randn(4, 3, 4, dtype=torch.float64),)),
    Case("outside_the_layers", OutsideTheLayers, vectors(size=4)),
    Case("scalars", Scalars, vectors()),
    Case("scalars_one_sample", Scalars, vectors(b=1)),
    Case("padded_tokens", PaddedTokens, lambda: (torch.randint(0, 7, (6, 3)),)),
    Case("norms", norms, lambda: (torch.randn(3, 2, 5, dtype=torch.float64),)),
    Case("unknown_layers", unknown_layers, images(b=3, channels=2, size=2), vmap=False),
    Case("unknown_layers_one_sample", unknown_layers, images(b=1, channels=2, size=2), vmap=False),
    Case("torchvision_block", torchvision_block, images()),
    Case("cross_attention", CrossAttention, padded_sequences),
    Case(
        "translation",
        Translation,
        lambda: tuple(torch.randn(3, T, 4, dtype=torch.float64) for T in (4, 3)),
    ),
    Case("lstm", lambda: Recurrent(nn.LSTM), sequences()),
    Case("gru", lambda: Recurrent(nn.GRU, bias=False), sequences()),
    Case("rnn", lambda: Recurrent(nn.RNN, nonlinearity="relu", num_layers=2), sequences()),
    Case(
        "gru_packed",
        lambda: Recurrent(nn.GRU, bidirectional=True, num_layers=2),
        lambda: (*sequences()(), torch.tensor([3, 1, 3, 2])),
        vmap=False,
    ),
    Case("cells", Cells, sequences()),
    Case("frames", Frames, lambda: (torch.randn(3, 2, 2, 5, 5, dtype=torch.float64),)),
    Case("resnet_gn", lambda: ResNetGN(8, width=4, in_channels=1, num_groups=2), images()),
    Case("image_tokens", ImageTokens, lambda: (torch.randn(3, 3, 4, dtype=torch.float64),)),
    Case("image_tokens_one_sample", ImageTokens, lambda: (torch.randn(1, 3, 4, dtype=torch.float64),)),
    Case("learned_queries", LearnedQueries, lambda: (torch.randn(2, 3, 4, dtype=torch.float64),)),
    Case("operator", Operator, vectors(b=4)),
    Case("folded_time", FoldedTime, lambda: (torch.randn(3, 3, 1, 3, 3, dtype=torch.float64),)),
    Case("time_first", TimeFirst, lambda: (torch.randint(0, 7, (3, 3)),)),
    Case("decomposed_weight", DecomposedWeight, vectors(b=4)),
    Case("bags", Bags, lambda: (torch.randint(0, 7, (3, 3)),), vmap=False),
    Case("recomputed", Recomputed, vectors(b=5), vmap=False),
    Case("shrinking", Shrinking, lambda: (*sequences()(), torch.tensor([1, 3, 2, 3])), vmap=False),
    Case("rotations", Rotations, vectors(b=4, size=4)),
    Case("functions", Functions, lambda: (torch.randn(3, 3, 4, dtype=torch.float64),), vmap=False),
    Case("forces", Forces, vectors(b=4, size=4), vmap=False),
)
VMAP_CASES = tuple(case for case in CASES if case.vmap)
CASES_BY_NAME = {case.name: case for case in CASES}
