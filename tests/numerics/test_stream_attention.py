"""Attention in the streaming engine, in all variants of `nn.MultiheadAttention` and as users write it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import Problem, flattened
from test_optim_engines import assert_right
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional

from gramgn import GramGaussNewton, Term
from gramgn.optim import Rows, Stream, Vmap

B, T, E = 3, 4, 6


class Attending(nn.Module):
    """Attention of the first times to all, `keys` other sequences, or of all to all."""

    def __init__(
        self, *, keys: int = 0, calls: int = 1, call: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, **options)
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 2)
        sizes = (options.get("kdim", E), options.get("vdim", E))[:keys]
        self.others = nn.ModuleList(nn.Linear(E, size) for size in sizes)
        self.calls, self.call = calls, call or {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        others = [layer(x) for layer in self.others]
        for _ in range(self.calls):
            query = x.narrow(1 if self.attention.batch_first else 0, 0, T - 1) if others else x
            x, weights = self.attention(query, *(others * 2)[:2] if others else (x, x), **self.call)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        y = self.last(x.tanh()).mean(dim=1)
        return y if weights is None else y + weights.square().flatten(1).sum(dim=1, keepdim=True)


def check(
    model: nn.Module, engine: Stream | Vmap | Rows | None = None, shape: tuple[int, ...] = (B, T, E)
) -> None:
    torch.manual_seed(0)
    model = model.double()
    for param in model.parameters():
        param.data.add_(0.3 * torch.randn_like(param))
    x = torch.randn(*shape, dtype=torch.float64)
    assert_right(Problem(model, (x,), torch.sin), (engine or Stream()).build())


CAUSAL = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
PADDING = torch.tensor([[False] * T, [False] * 2 + [True] * 2, [False] * 3 + [True]])
VARIANTS = {
    "plain": {},
    "no_bias": {"bias": False},
    "two_others": {"keys": 2},
    "one_other": {"keys": 1},
    "kdim": {"keys": 2, "kdim": 5},
    "kdim_vdim_no_bias": {"keys": 2, "kdim": 5, "vdim": 7, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "bias_kv_others": {"add_bias_kv": True, "keys": 1, "call": {"need_weights": False}},
    "zero_attn": {"add_zero_attn": True, "add_bias_kv": True},
    "no_weights": {"call": {"need_weights": False}},
    "weights_by_head": {"call": {"average_attn_weights": False}},
    "padding": {"call": {"key_padding_mask": PADDING}},
    "padding_no_weights": {"call": {"key_padding_mask": PADDING, "need_weights": False}},
    "boolean_mask": {"call": {"attn_mask": CAUSAL.isinf()}},
    "mask_and_padding": {"call": {"attn_mask": CAUSAL, "key_padding_mask": PADDING.double() * -9}},
    "causal": {"call": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}},
    "called_twice": {"calls": 2},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_attention(variant: str, batch_first: bool) -> None:
    check(Attending(batch_first=batch_first, **VARIANTS[variant]))


@pytest.mark.parametrize("engine", [Stream(chunk_size=2), Vmap(), Rows()], ids=str)
@pytest.mark.parametrize("keys", [0, 2])
def test_attention_in_other_engines(engine: Stream | Vmap | Rows, keys: int) -> None:
    """Also without a warning that asks to file an issue elsewhere."""
    check(Attending(keys=keys, call={"need_weights": False}), engine)


@pytest.mark.parametrize("keys", [0, 1])
@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_frozen_parts_of_attention(name: str, keys: int) -> None:
    model = Attending(keys=keys)
    model.attention.get_parameter(name).requires_grad_(False)
    check(model)


def test_attention_tied_to_another() -> None:
    first, second = Attending(), Attending(keys=1)
    second.attention.in_proj_weight = first.attention.in_proj_weight
    second.attention.out_proj.weight = first.attention.out_proj.weight

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    check(Both())


@pytest.mark.parametrize("num_samples", [1, T, 2 * T])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_over_any_number_of_samples(batch_first: bool, num_samples: int) -> None:
    """Whether or not there are as many times as samples."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(E, 2, 8, dropout=0.0, batch_first=batch_first)
            self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=False)
            self.last = nn.Linear(E, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            x = self.encoder(x)
            return self.last(x[:, -1] if batch_first else x[-1])

    check(Encoder(), shape=(num_samples, T, E))


def test_many_features_and_few_times_are_held_as_factors() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
    check(nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 2)), shape=(2, 2, 32))


class Written(nn.Module):
    """Attention as users write it."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.qkv, self.last, self.fused = nn.Linear(E, 3 * E, bias=False), nn.Linear(E, 1), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, E // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.mT).softmax(dim=-1) @ v
        return self.last(y.transpose(1, 2).flatten(2)).mean(dim=1)


@pytest.mark.parametrize("engine", [Stream(), Vmap()], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_attention_as_users_write_it(fused: bool, engine: Stream | Vmap) -> None:
    check(Written(fused=fused), engine)


def test_dropout_inside_attention_draws_the_masks_of_an_ordinary_pass() -> None:
    """T03: J is of the network with these masks: the step is the one that autograd takes row by row."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 8, dropout=0.3, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(T * E, 1)).double()
    by_rows, x = copy.deepcopy(model), torch.randn(B, T, E, dtype=torch.float64)
    for network, engine in ((model, "stream"), (by_rows, "loop")):
        optimizer = GramGaussNewton(network, lam=1.0, alpha=0.3, engine=engine)
        torch.manual_seed(1)
        optimizer.step(lambda network=network: network(x) - 1.0)
    assert torch.allclose(
        flattened(model.parameters()), flattened(by_rows.parameters()), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("engine", [Stream(chunk_size=12), Stream(memory_budget=2**23)], ids=str)
@pytest.mark.filterwarnings("ignore:GramGaussNewton. J takes:RuntimeWarning")
def test_dropout_inside_attention_in_chunks_of_samples(engine: Stream) -> None:
    """Gradients are so large that some of their entries alone show where the samples are."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24 * 64, 1)).double()
    x = torch.randn(48, 24, 64, dtype=torch.float64)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine=engine)
    for _ in range(2):
        optimizer.step(lambda: model(x))


def test_a_term_differentiates_attention_twice() -> None:
    """Fused attention has no second derivatives and no rule for samples: neither an error nor a warning."""
    torch.manual_seed(0)
    model = Written(fused=True).double()
    x = torch.randn(B, T, E, dtype=torch.float64)
    before = flattened(model.parameters()).detach().clone()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3)
    info = optimizer.step(terms=Term(lambda u, x: grad(lambda x: u(x[None]).sum())(x).square().sum(), x))
    assert info.loss > 0
    assert not torch.equal(flattened(model.parameters()), before)
