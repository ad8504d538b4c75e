"""One table of networks with data in float64; every test of the optimizer's mathematics runs over it.

Legend: b samples, q outputs per sample, k residuals per sample, m trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gramgn.models import ResNetBN, ResNetFixup, ResNetGN


@dataclass(frozen=True)
class Case:
    """A network, the arguments of its call, and the residuals of its output."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    residual: Callable[[Tensor], Tensor] | None = None
    """Output to residual; None: output minus random targets of its shape."""

    def make(self) -> Problem:
        """Return the case with fixed random numbers, all parameters moved away from special values."""
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


@dataclass(frozen=True)
class Problem:
    """A case that was made."""

    model: nn.Module
    args: tuple[Tensor, ...]
    residual: Callable[[Tensor], Tensor]

    def closure(self) -> Tensor:
        """Return the residuals, as a user's closure does."""
        return self.residual(self.model(*self.args))

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters that require gradients, by name."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def flat(self) -> Tensor:
        """Return a copy of the trainable parameters as one vector [m]."""
        return torch.cat([param.detach().flatten().clone() for param in self.trained().values()])

    def residual_at(self, flat: Tensor) -> Tensor:
        """Return the residuals, flattened, with the trainable parameters replaced by ``flat`` [m]."""
        state, start = {}, 0
        for name, param in self.trained().items():
            state[name] = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        return self.residual(functional_call(self.model, state, self.args)).flatten()

    def dense_jacobian(self) -> Tensor:
        """Return J [b k, m] of the whole batch, samples free to interact, without an engine's code."""
        return torch.autograd.functional.jacobian(self.residual_at, self.flat())


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
    """Parameters used by functions, without a layer that owns them; a scalar bias and scale."""

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
    """Two inputs with an entry for each sample."""

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


def frozen_batch_norm() -> nn.Module:
    model = ResNetBN(8, width=4, in_channels=1)
    model(torch.randn(16, 1, 8, 8))
    return model.eval()


def vectors(b: int = 6, size: int = 5) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(b, size, dtype=torch.float64),)


def images(b: int = 5, channels: int = 1, size: int = 8) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(b, channels, size, size, dtype=torch.float64),)


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
    Case("resnet_gn", lambda: ResNetGN(8, width=4, in_channels=1, num_groups=2), images()),
)
CASES_BY_NAME = {case.name: case for case in CASES}
