"""Muon for hidden matrices and kernels, AdamW for the rest."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from gramgn.errors import ConfigError
from gramgn.models import ResNetFixup, ResNetGN
from gramgn.training import muon_with_adamw, split_for_muon


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Tanh(),
        nn.Conv2d(6, 8, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.Tanh(),
        nn.Linear(12, 1),
        nn.Flatten(start_dim=0),
    )


def backward(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 3, 8, 8, generator=generator), torch.randn(10, generator=generator)
    (model(x) - y).square().mean().backward()


@pytest.mark.parametrize("network", [ResNetFixup, ResNetGN])
def test_every_parameter_has_one_place(network: type[nn.Module]) -> None:
    """Kernels between the first and the last layer go to Muon; biases, scales and norms never do."""
    model = network(depth=14)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = split_for_muon(model.parameters())
    assert sorted(names[id(p)] for p in [*matrices, *others]) == sorted(names.values())
    assert {names[id(p)].rsplit(".", 2)[-2] for p in matrices} == {"conv1", "conv2"}
    assert {names[id(p)] for p in others if p.ndim >= 2} == {"stem.weight", "last.weight"}
    with_ends, _ = split_for_muon(model.parameters(), "muon")
    assert {names[id(p)] for p in with_ends} - {names[id(p)] for p in matrices} == {
        "stem.weight",
        "last.weight",
    }


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_kernels_step_is_the_orthogonal_factor_of_its_flattened_gradient(
    memory_format: torch.memory_format,
) -> None:
    """First step, no momentum: lr sqrt(max(1, out / in)) times U V^T of the gradient [out, in h w], roughly."""
    model = small_net()
    model[2].to(memory_format=memory_format)
    before = model[2].weight.detach().clone()
    backward(model)
    gradient = model[2].weight.grad.flatten(1).double()
    muon_with_adamw(model.parameters(), lr=0.5, momentum=0.0).step()
    step = (before - model[2].weight.detach()).flatten(1).double() / 0.5
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    # Five Newton-Schulz steps bring singular values to about 0.7 to 1.2, and keep the singular vectors.
    along = (u.T @ step @ vh.T).diagonal()
    assert float(along.min()) > 0.5
    assert float(along.max()) < 1.3
    assert float((step - u @ torch.diag(along) @ vh).norm() / step.norm()) < 0.05


def test_the_rest_follows_adamw() -> None:
    ours = small_net()
    reference = copy.deepcopy(ours)
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "lr": 0.01}
    adamw = torch.optim.AdamW(reference.parameters(), **settings)
    muon = muon_with_adamw(ours.parameters(), lr=0.0, adamw_lr=0.01, adamw_eps=1e-8, adamw_weight_decay=0.1)
    for _ in range(3):
        for model, optimizer in ((ours, muon), (reference, adamw)):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        for index in (2, 5):  # what Muon has stands still at lr 0; let the reference have the same
            reference[index].weight.data.copy_(ours[index].weight.data)
    for name, value in ours.named_parameters():
        torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_a_schedule_scales_both_rates() -> None:
    optimizer = muon_with_adamw(small_net().parameters(), lr=0.02, adamw_lr=0.001)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.0005]


def test_state_is_exact() -> None:
    """G09: a loaded state takes the same next step, bit for bit; a fresh one does not."""
    model = small_net()
    optimizer = muon_with_adamw(model.parameters(), weight_decay=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    copies = [copy.deepcopy(model) for _ in range(2)]
    loaded, cold = (muon_with_adamw(other.parameters(), weight_decay=0.01) for other in copies)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, either in ((model, optimizer), (copies[0], loaded), (copies[1], cold)):
        either.zero_grad()
        backward(network)
        either.step()
    ours, again, fresh = (nn.utils.parameters_to_vector(m.parameters()) for m in (model, *copies))
    assert torch.equal(ours, again)
    assert not torch.equal(ours, fresh)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r'pip install pytorch-optimizer .* the extra "muon"'):
        muon_with_adamw(small_net().parameters())


def test_nothing_for_muon_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"optimizer\.first_and_last=muon"):
        muon_with_adamw(model.parameters())
    assert len(muon_with_adamw(model.parameters(), first_and_last="muon").param_groups[0]["params"]) == 2
