"""The paths of the step benchmark: same network, same update, and a row that says what did not run."""

from __future__ import annotations

import pytest
import torch

from benchmarks import (
    PATHS,
    Path,
    Prepared,
    Problem,
    Result,
    Settings,
    Shape,
    choose_paths,
    make_problem,
    measure,
    ours,
    parameters_of,
    peak_mib,
)
from gramgn.errors import InputError

CPU = torch.device("cpu")
TINY = Shape.parse("resnet8:4x8")


# --- Names on the command line ---


def test_shapes_are_read_and_written() -> None:
    assert Shape.parse("resnet:128x64") == Shape("resnet", 32, 128, 64)
    assert Shape.parse("resnet8:16x32") == Shape("resnet", 8, 16, 32)
    assert Shape.parse("mlp:128") == Shape("mlp", 1024, 128, None)
    assert Shape.parse("mlp3x64:128") == Shape("mlp", 64, 128, None, layers=3)
    for text in ("resnet:128x64", "resnet8:16x32", "resnet18_gn:64x64", "mlp:128", "mlp64:1", "mlp3x64:1"):
        assert Shape.parse(text).text == text


@pytest.mark.parametrize(
    "text",
    [
        "vgg:1x1",
        "resnet:128",
        "mlp:4x4",
        "resnet:0x8",
        "resnet9:4x8",
        "resnet3x8:4x8",
        "resnet18_gn:1",
        "mlp3x:1",
        "mlp:",
        "",
    ],
)
def test_other_shapes_are_rejected(text: str) -> None:
    with pytest.raises(InputError, match=f"shape '{text}'"):
        Shape.parse(text)


def test_paths_always_begin_with_sgd() -> None:
    assert [path.name for path in choose_paths(["vmap", "sgd"])] == ["sgd", "vmap"]
    with pytest.raises(InputError, match=r"no path 'vmpa' \(did you mean 'vmap'\?\)"):
        choose_paths(["vmpa"])


# --- The problem ---


def test_the_problem_has_a_jacobian_in_every_parameter() -> None:
    problem = make_problem(TINY, CPU)
    grads = torch.autograd.grad(problem.model(problem.x).sum(), list(problem.model.parameters()))
    assert all(float(grad.abs().max()) > 0 for grad in grads)
    again = make_problem(TINY, CPU)
    assert torch.equal(problem.x, again.x)
    assert torch.equal(problem.y, again.y)


# --- What a row says ---


def measured(path: Path, accuracy: bool = True) -> Result:
    settings = Settings(CPU, torch.get_num_threads(), rounds=2, memory=False, accuracy=accuracy)
    return measure(TINY, [PATHS["sgd"], path], settings, lambda text: None)


def test_a_path_with_another_update_is_not_timed() -> None:
    def half(problem: Problem, lr: float, variant: str) -> Prepared:
        return ours(problem, lr / 2, variant)

    row = measured(Path("half", "half", half)).rows[-1]
    assert row.step_s is None
    assert row.note == "half: not this update (relative error 5.0e-01)"
    right = measured(Path("right", "right", ours)).rows[-1]
    assert right.step_s is not None
    assert right.error is not None
    assert 0 < right.error < 1e-4


def test_the_fastest_right_variant_is_taken() -> None:
    def build(problem: Problem, lr: float, variant: str) -> Prepared:
        prepared = ours(problem, lr / 2 if variant == "wrong" else lr, "")
        if variant != "slow":
            return prepared
        return Prepared(
            lambda: [prepared.step() for _ in range(30)] if lr < 1 else prepared.step(), prepared.model
        )

    row = measured(Path("p", "p", build, variants=("slow", "quick", "wrong"))).rows[-1]
    assert row.variant == "quick"
    assert "wrong: not this update" in row.note


def test_a_failing_package_is_reported_and_our_own_failure_is_raised() -> None:
    def broken(problem: Problem, lr: float, variant: str) -> Prepared:
        raise NotImplementedError("no rule for this layer\nmore")

    assert measured(Path("p", "P", broken, package="torch")).rows[-1].note == (
        "P: NotImplementedError: no rule for this layer"
    )
    assert measured(Path("p", "P", broken, package="no_such_package")).rows[-1].note == (
        "not installed: pip install 'gramgn[bench]'"
    )
    with pytest.raises(NotImplementedError):
        measured(Path("p", "P", broken))


def test_formats_of_images_are_left_out_for_an_mlp() -> None:
    problem = make_problem(Shape.parse("mlp8:2"), CPU)
    assert not PATHS["sgd-graph"].fits(problem)
    assert PATHS["sgd"].fits(problem)
    assert PATHS["opacus"].variants_for(problem) == ("contiguous",)


def test_every_variant_of_sgd_is_the_same_step() -> None:
    problem = make_problem(TINY, CPU)
    model, x = problem.copied(channels_last=True)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert parameters_of(model)["stem.weight"].is_contiguous(memory_format=torch.channels_last)
    plain, *others = (PATHS["sgd"].build(problem, 1.0, variant) for variant in PATHS["sgd"].variants)
    for prepared in (plain, *others):
        prepared.step()
    for other in others:
        for name, param in parameters_of(plain.model).items():
            torch.testing.assert_close(param, parameters_of(other.model)[name])


# --- Memory and drift ---


def test_peak_memory_grows_with_the_problem() -> None:
    """An MLP of width 512 with its gradient and momentum: 3 x 3 MiB next to the batch; J 193 MiB more for vmap."""
    shape = Shape.parse("mlp512:64")
    of_sgd, of_vmap = (peak_mib(name, "", shape, CPU, 1) for name in ("sgd", "vmap"))
    assert 8 < of_sgd < 64
    assert 150 < of_vmap - of_sgd < 1000


def test_sgd_moves_weights_too_little_to_matter() -> None:
    problem = make_problem(TINY, CPU)
    prepared = PATHS["sgd"].build(problem, 1.0, "")
    for _ in range(20):
        prepared.step()
    before = parameters_of(problem.model)
    moved = max(
        float((param - before[name]).norm() / (before[name].norm() + 1))
        for name, param in parameters_of(prepared.model).items()
    )
    assert 0 < moved < 1e-2
