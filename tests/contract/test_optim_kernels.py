"""Which compiled kernels are used, how that is chosen, and that a resumed state keeps them."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import GramGaussNewton, Stream
from gramgn.optim import kernels

FORMS = kernels.available()
X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 5, 3, stride=2),
        nn.Flatten(),
        nn.Linear(45, 1),
    )


def built(choice: str = "auto", model: nn.Module | None = None) -> tuple[nn.Module, GramGaussNewton]:
    model = network() if model is None else model
    return model, GramGaussNewton(model, lam=1.0, alpha=0.3, momentum=0.5, engine=Stream(kernels=choice))


def take(model: nn.Module, optimizer: GramGaussNewton, steps: int = 1) -> Tensor:
    x = X.to(next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.step(lambda: model(x) - 1.0)
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def offer(monkeypatch: pytest.MonkeyPatch, *forms: str) -> None:
    """Make this a machine that offers certain forms only."""
    monkeypatch.setattr(kernels, "available", lambda: forms)
    if not forms:
        monkeypatch.setattr(
            kernels, "missing", lambda: "the compiled kernels are not built: run make kernels"
        )


def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    """In continuous integration; elsewhere an installation may lack them."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if not os.environ.get("CI") or compiler is None:
        pytest.skip("only where CI is set and there is a C++ compiler")
    assert kernels.missing() is None


@pytest.mark.parametrize(
    ("choice", "variable", "offered", "expected"),
    [
        ("auto", None, ("avx512", "avx2", "portable"), "avx512"),
        ("auto", "", ("avx2", "portable"), "avx2"),
        ("auto", None, ("portable",), "off"),
        ("auto", None, (), "off"),
        ("auto", "0", ("avx2", "portable"), "off"),
        ("auto", "OFF", ("avx2", "portable"), "off"),
        ("auto", "auto", ("avx2", "portable"), "avx2"),
        ("auto", "AVX2", ("avx512", "avx2", "portable"), "avx2"),
        ("auto", "1", ("avx2", "portable"), "avx2"),
        ("auto", "1", ("portable",), "portable"),
        ("auto", "portable", ("avx2", "portable"), "portable"),
        ("off", "1", ("avx2", "portable"), "off"),
        ("portable", "0", ("avx2", "portable"), "portable"),
        ("avx2", None, ("avx512", "avx2", "portable"), "avx2"),
    ],
)
def test_the_option_comes_before_the_variable_before_the_machine(
    choice: str,
    variable: str | None,
    offered: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, *offered)
    if variable is not None:
        monkeypatch.setenv(kernels.VARIABLE, variable)
    assert kernels.choose(choice) == expected


@pytest.mark.parametrize(
    ("choice", "variable", "offered", "message"),
    [
        ("fast", None, (), "kernels must be one of 'auto', 'off', 'avx512', 'avx2', 'portable', got 'fast'"),
        (
            "auto",
            "yes",
            (),
            r"GRAMGN_KERNELS must be 0 \(no kernels\), 1 .* avx512, avx2, portable, got 'yes'",
        ),
        ("auto", "1", (), "GRAMGN_KERNELS=1: the compiled kernels are not built: .*make kernels"),
        ("avx2", None, (), "kernels='avx2': the compiled kernels are not built: .*make kernels"),
        ("avx512", None, ("avx2", "portable"), "does not run this form, only avx2 and portable"),
    ],
)
def test_what_cannot_be_used_is_rejected(
    choice: str,
    variable: str | None,
    offered: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, *offered)
    if variable is not None:
        monkeypatch.setenv(kernels.VARIABLE, variable)
    with pytest.raises(ValueError, match=message):
        Stream(kernels=choice)


def test_the_optimizer_names_what_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built("off")[1].kernels == "off"
    for form in FORMS:
        assert built(form)[1].kernels == form
        assert built(form, network().double())[1].kernels == "off"
    assert GramGaussNewton(network(), lam=1.0, alpha=0.3, engine="loop").kernels == "off"
    monkeypatch.setenv(kernels.VARIABLE, "0")
    model, optimizer = built()
    assert optimizer.kernels == "off"
    assert torch.equal(take(model, optimizer), take(*built("off")))


@pytest.mark.parametrize("form", FORMS)
def test_a_step_with_kernels_is_the_step_without(form: str) -> None:
    exact_model = network().double()
    exact = take(exact_model, GramGaussNewton(exact_model, lam=1.0, alpha=0.3, engine="loop"))
    start = nn.utils.parameters_to_vector(network().parameters()).detach()
    with_kernels = take(*built(form))
    assert (with_kernels - exact).norm() <= 1e-4 * (exact - start).norm()
    assert torch.equal(with_kernels, take(*built(form)))


@pytest.mark.parametrize("form", [*FORMS, "off"])
def test_a_state_keeps_its_kernels(form: str) -> None:
    """G09: whatever the machine would choose, a resumed run computes what it would have without stopping."""
    model, optimizer = built(form)
    take(model, optimizer, 2)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    whole = take(model, optimizer, 2)
    other, resumed = built("auto")
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert resumed.kernels == form
    assert torch.equal(take(other, resumed, 2), whole)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        assert copied((model, optimizer))[1].kernels == form


def test_a_state_of_kernels_that_are_missing_here_is_resumed_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = built("off")[1].state_dict()
    state["gram_gauss_newton"]["engine"]["choices"]["kernels"] = "avx512"
    offer(monkeypatch)
    model, optimizer = built()
    message = r"saved with kernels='avx512', and continues with 'off' \(the compiled kernels are not built"
    with pytest.warns(RuntimeWarning, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.kernels == "off"
    take(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(model=network().double())[1].load_state_dict(state)  # kernels serve no float64 network


@pytest.mark.skipif(not FORMS, reason=str(kernels.missing()))
def test_what_is_asked_for_comes_before_what_a_state_used(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = built("off")[1].state_dict()
    _, optimizer = built(FORMS[-1])
    with pytest.warns(
        RuntimeWarning, match=f"saved with kernels='off', and continues with '{FORMS[-1]}' .as was ask"
    ):
        optimizer.load_state_dict(saved)
    assert optimizer.kernels == FORMS[-1]
    monkeypatch.setenv(kernels.VARIABLE, "0")
    _, other = built()
    with pytest.warns(RuntimeWarning, match="continues with 'off'"):
        other.load_state_dict(optimizer.state_dict())
    assert other.kernels == "off"


def test_a_state_from_before_there_were_kernels_used_none() -> None:
    _, optimizer = built("off")
    state = optimizer.state_dict()
    del state["gram_gauss_newton"]["engine"]["choices"]["kernels"]
    _, other = built("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)
    assert other.kernels == "off"


def loaded_from(folder: Path) -> Any:
    """Import a copy of the package from another folder."""
    spec = importlib.util.spec_from_file_location("copied_kernels", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["copied_kernels"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["copied_kernels"]
    return module


@pytest.mark.skipif(not FORMS, reason=str(kernels.missing()))
def test_a_library_of_other_sources_or_another_interpreter_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (library,) = folder.glob("compiled.*.so")
    assert loaded_from(folder).available() == FORMS
    sources = [*folder.glob("*.h"), *folder.glob("*.cpp")]
    sources[0].write_text(sources[0].read_text() + "\n")
    assert "not of the present sources: run make kernels" in loaded_from(folder).missing()
    for source in sources:
        source.unlink()
    assert loaded_from(folder).available() == FORMS  # an installation without sources
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / library.name).write_bytes(b"no library")
    assert "cannot be loaded" in loaded_from(damaged).missing()
    module = loaded_from(damaged)
    with pytest.warns(RuntimeWarning, match="cannot be loaded .* steps take longer") as caught:
        assert [module.choose(choice) for choice in ("off", "auto", "auto")] == ["off"] * 3
    assert len(caught) == 1
    library.rename(folder / "compiled.cpython-27.so")
    module = loaded_from(folder)
    assert "not built" in module.missing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.choose("auto") == "off"
