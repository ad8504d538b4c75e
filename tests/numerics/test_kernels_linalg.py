"""The compiled Gram products and sums, in every form that this machine runs, against float64."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gramgn.optim import kernels
from gramgn.optim.kernels import Kernels

EPS = torch.finfo(torch.float32).eps

if not kernels.available():
    pytest.skip(str(kernels.missing()), allow_module_level=True)


@pytest.fixture(params=kernels.available())
def form(request: pytest.FixtureRequest) -> Kernels:
    loaded = kernels.load(request.param)
    assert loaded is not None
    return loaded


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 7, 8, 25, 97, 200])
@pytest.mark.parametrize("size", [1, 15, 17, 512, 513, 1601])
def test_gram(form: Kernels, n: int, size: int) -> None:
    """Symmetric to the last bit, and as accurate as sums of 512 float32 products."""
    rows = normal(n, size)
    exact = rows.double() @ rows.double().T
    G = form.gram(rows)
    assert G.dtype == torch.float64
    assert torch.equal(G, G.T)
    norms = rows.double().norm(dim=1)
    assert bool(((G - exact).abs() <= 30 * EPS * norms[:, None] * norms).all())
    assert torch.equal(form.gram(rows), G)


@pytest.mark.parametrize("size", [40, 1100])
def test_gram_is_added_to_what_is_there_for_all_parts_and_strides(form: Kernels, size: int) -> None:
    n = 13
    wide = normal(3, n, 2 * size + 5)
    G = torch.ones(n, n, dtype=torch.float64)
    for rows in (
        wide[:, :, 3 : 3 + size],
        wide[1:, :, :size],
        wide[:, :, : 2 * size : 2],
        wide[:1].expand(2, -1, -1),
    ):
        exact = torch.einsum("pns,pms->nm", rows.double(), rows.double()) + G
        assert form.gram(rows, G) is G
        assert torch.allclose(G, exact, rtol=1e-5, atol=1e-5 * size)
        assert torch.equal(G, G.T)


def test_gram_of_cancelling_sums(form: Kernels) -> None:
    """Pieces are summed in float64: 1e6 next to -1e6 in later columns leaves the small part."""
    size = 40 * 512
    rows = normal(9, size)
    large = torch.zeros(9, 2 * size)
    large[:, :size], large[:, size:] = rows, rows
    large[1:, size:] *= -1
    G = form.gram(large)
    assert bool((G[0, 1:].abs() <= 1e-4 * size**0.5).all())


def test_threads_change_the_gram_matrix_by_rounding_in_float64_only(form: Kernels) -> None:
    rows = normal(64, 20000)
    several = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        several.append(form.gram(rows))
        assert torch.equal(form.gram(rows), several[-1])
    for G in several[1:]:
        assert torch.allclose(G, several[0], rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(form: Kernels, bad: float) -> None:
    rows = normal(20, 700)
    rows[5, 650] = bad
    G = form.gram(rows)
    finite = torch.ones(20, dtype=torch.bool)
    finite[5] = False
    assert bool(torch.isfinite(G[finite][:, finite]).all())
    assert not bool(torch.isfinite(G[5]).any())
    assert torch.isfinite(form.vector_times_rows(torch.ones(20), rows)).sum() == 699
    sums = (form.row_sums(rows), form.row_dots(rows, torch.ones_like(rows)))
    assert all(torch.equal(torch.isfinite(each), finite) for each in sums)
    of_channels = (form.channel_sums(rows[None]), form.channel_dots(rows[None], torch.ones_like(rows[None])))
    assert all(torch.isfinite(each).sum() == 699 for each in of_channels)


@pytest.mark.parametrize("n", [1, 3, 4, 9, 130])
@pytest.mark.parametrize("size", [1, 18, 1023, 5000])
def test_vector_times_rows(form: Kernels, n: int, size: int) -> None:
    wide = normal(2, n, size + 3)
    u = normal(n, seed=1).double()
    for rows in (wide[:, :, :size].contiguous(), wide[:, :, 2 : 2 + size], wide[0, :, 1 : 1 + size]):
        exact = u @ rows.double()
        bound = 2 * (n + 4) * EPS * (u.abs() @ rows.double().abs())
        assert bool(((form.vector_times_rows(u, rows) - exact).abs() <= bound).all())


MEMORY = {
    "rows": lambda shape, seed: normal(*shape, seed=seed),
    "channels_last": lambda shape, seed: normal(*shape, seed=seed).contiguous(
        memory_format=torch.channels_last
    ),
    "strided": lambda shape, seed: normal(*shape[:-1], 2 * shape[-1], seed=seed)[..., ::2],
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 5, 7, 9), (9, 16, 8, 8), (2, 3, 65, 40), (4, 37, 3, 5), (2, 200, 4, 3)]
)
def test_sums_of_rows_and_of_channels(form: Kernels, shape: tuple[int, ...], memory: str) -> None:
    a, c = MEMORY[memory](shape, 0), MEMORY[memory](shape, 1)
    other = MEMORY["rows"](shape, 1)
    last = (a.movedim(1, -1), c.movedim(1, -1), other.movedim(1, -1))
    for got, of, dims in (
        (form.row_sums(a), a.double(), (1, 2, 3)),
        (form.row_dots(a, c), a.double() * c, (1, 2, 3)),
        (form.row_dots(a, other), a.double() * other, (1, 2, 3)),
        (form.channel_sums(last[0]), a.double(), (2, 3)),
        (form.channel_dots(last[0], last[1]), a.double() * c, (2, 3)),
        (form.channel_dots(last[0], last[2]), a.double() * other, (2, 3)),
        (form.channel_sums(a), a.double(), (1, 2)),
    ):
        assert got.dtype == torch.float32
        assert bool(((got - of.sum(dims)).abs() <= 40 * EPS * of.abs().sum(dims)).all())


@pytest.mark.parametrize("channels", [1, 3, 7, 15, 16, 17, 24, 33, 64, 130])
@pytest.mark.parametrize("places", [1, 3, 16, 31, 2500])
def test_channels_of_many_places(form: Kernels, channels: int, places: int) -> None:
    """Sums of thousands of float32 numbers do not drift: partial sums are short."""
    d, x = normal(2, places, channels).add_(10), normal(2, places, channels, seed=1)
    d, x = d.unsqueeze(2), x.unsqueeze(2)
    for got, of in ((form.channel_sums(d), d.double()), (form.channel_dots(d, x), d.double() * x)):
        assert bool(((got - of.sum((1, 2))).abs() <= 30 * EPS * of.abs().sum((1, 2))).all())


def test_a_sample_does_not_depend_on_the_others(form: Kernels) -> None:
    d, x = normal(6, 50, 20), normal(6, 50, 20, seed=1)
    for both in (form.channel_dots, form.row_dots):
        assert torch.equal(both(d, x)[2:3], both(d[2:3], x[2:3]))
    for one in (form.channel_sums, form.row_sums):
        assert torch.equal(one(d)[2:3], one(d[2:3]))


def test_nothing_is_summed_where_there_is_nothing(form: Kernels) -> None:
    assert torch.equal(form.gram(torch.empty(3, 0)), torch.zeros(3, 3, dtype=torch.float64))
    assert form.gram(torch.empty(2, 0, 5)).shape == (0, 0)
    assert form.gram(torch.empty(0, 4, 5)).count_nonzero() == 0
    assert torch.equal(form.vector_times_rows(torch.empty(0), torch.empty(0, 4)), torch.zeros(4))
    assert form.vector_times_rows(torch.ones(2), torch.empty(3, 2, 0)).shape == (3, 0)
    for shape in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        empty = torch.empty(shape)
        assert torch.equal(form.row_sums(empty), empty.sum((1, 2)))
        assert torch.equal(form.row_dots(empty, empty), empty.sum((1, 2)))
        assert torch.equal(form.channel_sums(empty), empty.sum(1))
        assert torch.equal(form.channel_dots(empty, empty), empty.sum(1))
    rows = torch.ones(2, 9 * 3 * 4)
    options: dict[str, Any] = {"kernel_size": (3, 3), "padding": (1, 1)}
    form.conv_weight(torch.empty(0, 3, 5, 5), torch.empty(0, 4, 5, 5), rows[:0], **options)
    form.conv_weight(torch.empty(2, 3, 0, 5), torch.empty(2, 4, 0, 5), rows, **options)
    assert not rows.any()


def test_shapes_that_do_not_belong_together_are_rejected(form: Kernels) -> None:
    """The library reads memory by the sizes that it is given."""
    x, grad, rows = normal(2, 3, 5, 5), normal(2, 4, 5, 5), torch.empty(2, 9 * 3 * 4)
    with pytest.raises(ValueError, match="no convolution of"):
        form.conv_weight(x, grad, rows, kernel_size=(3, 3))
    with pytest.raises(ValueError, match="no convolution of"):
        form.conv_weight(x, grad[:1], rows, kernel_size=(3, 3), padding=(1, 1))
    with pytest.raises(ValueError, match="do not fit"):
        form.conv_weight(x, grad, rows[:, :-1], kernel_size=(3, 3), padding=(1, 1))
    with pytest.raises(ValueError, match="not adjacent"):
        form.conv_weight(x, grad, rows.T.contiguous().T, kernel_size=(3, 3), padding=(1, 1))
    for call in (
        lambda: form.gram(normal(3, 4), torch.zeros(3, 3)),
        lambda: form.gram(normal(3, 4), torch.zeros(4, 4, dtype=torch.float64)),
        lambda: form.vector_times_rows(torch.ones(2), normal(3, 4)),
        lambda: form.row_dots(normal(3, 4), normal(4, 3)),
        lambda: form.channel_dots(normal(3, 4), normal(3, 5)),
    ):
        with pytest.raises(
            ValueError, match=r"no contiguous float64 matrix|one entry per row|different shapes"
        ):
            call()


def test_ordinary_float32_tensors_are_served() -> None:
    """Nothing else: its memory holds something else, or there is none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Own(Tensor):
        pass

    plain = normal(4, 3)
    assert kernels.serves(plain, plain.T, plain[::2], torch.nn.Parameter(plain), plain.new_empty(0))
    with FakeTensorMode():
        fake = torch.empty(4, 3)
    for other in (
        plain.double(),
        plain.bfloat16(),
        plain.to("meta"),
        plain.to_sparse(),
        plain.as_subclass(Own),
        fake,
        torch.complex(plain, plain).conj().imag,
        torch._efficientzerotensor((4, 3)),
    ):
        assert not kernels.serves(plain, other)
    seen = []
    torch.func.vmap(lambda row: (seen.append(kernels.serves(row)), row.sum())[1])(plain)
    assert seen == [False]


def test_kernels_are_copied_by_their_name(form: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert copy.deepcopy(form) is form
    assert pickle.loads(pickle.dumps(form)) is form
