"""The compiled kernels of the CPU, called through ctypes: a C interface of pointers and sizes.

`make kernels` builds the library next to this file. Without a C++ compiler there is none, and the engines use torch
alone. A processor runs one or several forms of the same kernels:

- avx512: x86 processors with AVX-512 (F, BW, DQ, VL)
- avx2: x86 processors with AVX2 and FMA
- portable: whatever the compiler generates for the architecture. Only used if it is asked for by name: on x86 torch's
  own products are faster (45 to 85 against 40 GFLOP/s for Gram matrices of 128 rows and more); arm64 was not measured

Results are bitwise repeatable for one form and number of threads; two forms differ in the last bits. The kernels take
float32 tensors on the CPU (`serves`) and use as many threads as torch does.

b samples, n rows of J, C channels, F filters.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import os
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch  # before the library is loaded, which uses torch's OpenMP library
from torch import Tensor, nn

FORMS = ("avx512", "avx2", "portable")
"""All forms, the widest first."""

OFF = "off"
CHOICES = ("auto", OFF, *FORMS)
"""The values of the option `kernels`."""

VARIABLE = "GRAMGN_KERNELS"
"""The environment variable that replaces `"auto"`: one of `CHOICES` in any case, 0 (off) or 1 (the widest form)."""

_FOLDER = Path(__file__).parent
_CODES = {"avx512": 2, "avx2": 1, "portable": 0}
_NO_LIBRARY = (
    "the compiled kernels are not built: install a C++ compiler (g++ or clang++) and run make kernels, or pip install "
    "again"
)
_SHAPE = ("b", "C", "H", "W", "F", "Ho", "Wo", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "groups")
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_ARGUMENTS = {
    "conv_weight": (_P, _P, _P, _L, _P, _I),
    "gram": (_P, _L, _L, _L, _P),
    "vector_times_rows": (_P, _P, _L, _L, _L, _P),
    "row_sums": (_P, _L, _L, _P),
    "row_dots": (_P, _P, _L, _L, _P),
    "channel_sums": (_P, _L, _L, _L, _P),
    "channel_dots": (_P, _P, _L, _L, _L, _P),
}
_is_functional = torch._C._functorch.is_functorch_wrapped_tensor


class _Convolution(ctypes.Structure):
    _fields_ = [(name, _L) for name in _SHAPE]


def available() -> tuple[str, ...]:
    """Return the forms that this machine and installation offer, the widest first; none without a library."""
    library, _ = _library()
    return () if library is None else FORMS[FORMS.index(_widest(library)) :]


def missing() -> str | None:
    """Return why there are no kernels and what to do about it, or None if there are some."""
    return _library()[1]


def choose(choice: str) -> str:
    """Return the form that a value of the option `kernels` stands for, or `"off"`.

    Args:
        choice: `"off"`, a form, or `"auto"`: what the environment variable GRAMGN_KERNELS says, or without it the
            widest form, or `"off"` where that is `"portable"` or there is no library.

    Raises:
        ValueError: The choice or the variable has no such value, or this machine or installation lacks the form.

    Warns:
        RuntimeWarning: There is a library, but none that can be used, so that `"auto"` is `"off"`; once per process.
    """
    name, choice = _asked_for(choice)
    if choice == OFF:
        return OFF
    forms = available()
    if choice == "auto" and not forms:
        _warn_of_unusable_library()
        return OFF
    if not forms:
        raise ValueError(f"{name}: {missing()}")
    if choice == "auto":
        return forms[0] if forms[0] != "portable" else OFF
    if choice == "widest":
        return forms[0]
    if choice not in forms:
        raise ValueError(
            f"{name}: this processor does not run this form, only {' and '.join(forms)}: choose one of them, or 'auto'"
        )
    return choice


def resumed(saved: str, choice: str = "auto") -> str:
    """Return the form, or `"off"`, with which work that was done with `saved` is resumed.

    It is `saved`, so that results are the same to the last bit, unless this machine or installation lacks that form, or
    the option or the environment variable names another one; a warning reports that.

    Args:
        saved: A form or `"off"`.
        choice: The value of the option `kernels`, see `choose`.
    """
    own = choose(choice)
    is_open = _asked_for(choice)[1] == "auto"
    if own == saved or (is_open and saved in (OFF, *available())):
        return saved
    reason = (
        "as was asked for" if not is_open else missing() or f"this processor runs {', '.join(available())}"
    )
    warnings.warn(
        f"GramGaussNewton: the state was saved with kernels={saved!r}, and continues with {own!r} ({reason}): results "
        "will differ in the last bits",
        RuntimeWarning,
        stacklevel=4,
    )
    return own


def _asked_for(choice: str) -> tuple[str, str]:
    """Return how a message names the choice, and the choice: an entry of `CHOICES` or `"widest"`."""
    given = os.environ.get(VARIABLE)
    if choice != "auto" or not given:
        return f"kernels={choice!r}", choice
    if given.lower() not in ("0", "1", *CHOICES):
        raise ValueError(
            f"{VARIABLE} must be 0 (no kernels), 1 (the widest form) or one of {', '.join(CHOICES)}, got {given!r}"
        )
    return f"{VARIABLE}={given}", {"0": OFF, "1": "widest"}.get(given, given.lower())


@cache
def _warn_of_unusable_library() -> None:
    """Warn of a library that was built but is not used; that there is none is normal without a compiler."""
    _, reason = _library()
    if reason not in (None, _NO_LIBRARY):
        warnings.warn(f"GramGaussNewton: {reason}; steps take longer", RuntimeWarning, stacklevel=3)


@cache
def load(form: str) -> Kernels | None:
    """Return the kernels of a form of `available()`, or None for `"off"`."""
    return None if form == OFF else Kernels(form)


def serves(*tensors: Tensor) -> bool:
    """Return whether the kernels can read these tensors: ordinary ones, in float32, with memory on the CPU."""
    for tensor in tensors:
        if (
            tensor.dtype is not torch.float32
            or not tensor.is_cpu
            or type(tensor) not in (Tensor, nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or _is_functional(tensor)
        ):
            return False
    return True


class Kernels:
    """The kernels in one form; made by `load`.

    The tensors that are passed must satisfy `serves`. They may have any strides and may be empty; what does not lie in
    memory as a kernel reads it is copied first.

    Args:
        form: One of `available()`.
    """

    def __init__(self, form: str) -> None:
        library, reason = _library()
        if library is None or form not in available():
            raise ValueError(f"there are no kernels of the form {form!r}: {reason or available()}")
        self.form, self._code = form, _CODES[form]
        self._functions = {name: getattr(library, f"gramgn_{name}") for name in _ARGUMENTS}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.form,)

    def __repr__(self) -> str:
        return f"Kernels({self.form!r})"

    def conv_weight(
        self,
        x: Tensor,
        grad: Tensor,
        rows: Tensor,
        *,
        kernel_size: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        winograd: bool = True,
    ) -> None:
        """Write the gradient of a convolution's weight for each sample.

        Args:
            x: The input [b, C, H, W]; channels last is read without a copy.
            grad: The gradient of the output [b, F, Ho, Wo]; likewise.
            rows: Receives the gradients [b, kh kw (C / groups) F], entries in the order (kh, kw, C / groups, F). The
                entries of a row must be adjacent.
            kernel_size: (kh, kw).
            stride: Along (H, W).
            padding: Zeros on both sides of (H, W).
            dilation: Along (H, W).
            groups: The number of groups, a divisor of C and F.
            winograd: Whether Winograd's algorithm may be used where it is faster.

        Raises:
            ValueError: The shapes do not belong together.
            MemoryError: There is no memory for the kernel's scratch space.
        """
        x = x.contiguous(memory_format=torch.channels_last)
        grad = grad.contiguous(memory_format=torch.channels_last)
        shape = _geometry(
            tuple(x.shape),
            tuple(grad.shape),
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            tuple(rows.shape),
        )
        _check(rows.stride(1) == 1 or rows.shape[1] <= 1, "the entries of a row are not adjacent")
        if not rows.numel():
            return
        if not grad.numel() or not x.numel():
            rows.zero_()
            return
        self._run(
            "conv_weight",
            x.data_ptr(),
            grad.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            ctypes.addressof(shape),
            winograd,
        )

    def gram(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the sum over parts of rows rows^T in float64, exactly symmetric: float32 products of short pieces.

        Args:
            rows: [n, size] or [parts, n, size]; read without a copy if the entries of a row are adjacent.
            out: A contiguous matrix [n, n] in float64 to which the sum is added, and which is returned; None (default):
                a new one.

        Raises:
            MemoryError: There is no memory for the kernel's scratch space.
        """
        n, size = rows.shape[-2:]
        if out is None:
            out = torch.zeros(n, n, dtype=torch.float64)
        _check(
            out.shape == (n, n) and out.dtype is torch.float64 and out.is_contiguous() and out.is_cpu,
            "the result is no contiguous float64 matrix [n, n] on the CPU",
        )
        rows, to_row = _adjacent(rows)
        for start in _starts(rows) if n and size else ():
            self._run("gram", start, to_row, n, size, out.data_ptr())
        return out

    def vector_times_rows(self, u: Tensor, rows: Tensor) -> Tensor:
        """Return u^T rows, [size] or [parts, size], for u [n] of any dtype and rows [n, size] or [parts, n, size]."""
        *parts, n, size = rows.shape
        _check(u.shape == (n,), "the vector does not have one entry per row")
        out = rows.new_empty(*parts, size) if n else rows.new_zeros(*parts, size)
        u = u.detach().to("cpu", torch.float32).contiguous()
        rows, to_row = _adjacent(rows)
        if n and size:
            to = out.data_ptr()
            for start in _starts(rows):
                self._run("vector_times_rows", u.data_ptr(), start, to_row, n, size, to)
                to += 4 * size
        return out

    def row_sums(self, a: Tensor) -> Tensor:
        """Return the sum of each a[i], [n], for a [n, ...] in any memory format."""
        n = len(a)
        out = a.new_empty(n) if a.numel() else a.new_zeros(n)
        if a.numel():
            a = a if _is_dense(a) else a.contiguous()
            self._run("row_sums", a.data_ptr(), n, a.numel() // n, out.data_ptr())
        return out

    def row_dots(self, a: Tensor, c: Tensor) -> Tensor:
        """Return the inner product of each a[i] and c[i], [n], for a and c [n, ...] of one shape."""
        _check(a.shape == c.shape, "the tensors have different shapes")
        n = len(a)
        out = a.new_empty(n) if a.numel() else a.new_zeros(n)
        if a.numel():
            if a.stride() != c.stride() or not _is_dense(a):
                a, c = a.contiguous(), c.contiguous()
            self._run("row_dots", a.data_ptr(), c.data_ptr(), n, a.numel() // n, out.data_ptr())
        return out

    def channel_sums(self, d: Tensor) -> Tensor:
        """Return the sum over places, [b, C], for d [b, ..., C]; also channels-first memory is read without a copy."""
        b, C = d.shape[0], d.shape[-1]
        if not d.numel():
            return d.new_zeros(b, C)
        if not d.is_contiguous() and (first := d.movedim(-1, 1)).is_contiguous():
            return self.row_sums(first.flatten(end_dim=1)).view(b, C)
        d, out = d.contiguous(), d.new_empty(b, C)
        self._run("channel_sums", d.data_ptr(), b, d.numel() // (b * C), C, out.data_ptr())
        return out

    def channel_dots(self, d: Tensor, x: Tensor) -> Tensor:
        """Return the sum over places of d x, [b, C], for d and x [b, ..., C]; see `channel_sums`."""
        _check(d.shape == x.shape, "the tensors have different shapes")
        b, C = d.shape[0], d.shape[-1]
        if not d.numel():
            return d.new_zeros(b, C)
        if d.stride() == x.stride() and not d.is_contiguous() and (first := d.movedim(-1, 1)).is_contiguous():
            return self.row_dots(first.flatten(end_dim=1), x.movedim(-1, 1).flatten(end_dim=1)).view(b, C)
        d, x, out = d.contiguous(), x.contiguous(), d.new_empty(b, C)
        self._run("channel_dots", d.data_ptr(), x.data_ptr(), b, d.numel() // (b * C), C, out.data_ptr())
        return out

    def _run(self, name: str, *arguments: int) -> None:
        if self._functions[name](self._code, torch.get_num_threads(), *arguments):
            raise MemoryError(f"there is no memory for the kernel {name}")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _adjacent(rows: Tensor) -> tuple[Tensor, int]:
    """Return rows whose entries are adjacent in memory, copied if necessary, and the distance between rows."""
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        rows = rows.contiguous()
    return rows, rows.stride(-2)


def _starts(rows: Tensor) -> list[int]:
    """Return the address of each part of rows [n, size] or [parts, n, size]."""
    start = rows.data_ptr()
    return [start] if rows.ndim == 2 else [start + 4 * part * rows.stride(0) for part in range(len(rows))]


def _is_dense(a: Tensor) -> bool:
    """Return whether the entries of each a[i] fill a range of memory, one range after another, in whatever order."""
    return a.is_contiguous() or (a.ndim == 4 and a.is_contiguous(memory_format=torch.channels_last))


@lru_cache(maxsize=1024)
def _geometry(
    x: tuple[int, int, int, int],
    grad: tuple[int, int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    rows: tuple[int, int],
) -> _Convolution:
    """Return the description of a convolution that the library reads; checked, since it reads memory accordingly."""
    (b, C, *size), (_, F, *plane) = x, grad
    expected = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    ]
    _check(
        groups > 0 and C % groups == 0 and F % groups == 0 and grad[0] == b and plane == expected,
        f"no convolution of {list(x)} has an output of {list(grad)} with a kernel of {kernel}, stride {stride}, "
        f"padding {padding}, dilation {dilation} and {groups} groups",
    )
    _check(rows == (b, kernel[0] * kernel[1] * (C // groups) * F), f"rows of {list(rows)} do not fit")
    return _Convolution(b, C, *size, F, *plane, *kernel, *stride, *padding, *dilation, groups)


def _restored(form: str) -> Kernels | None:
    return load(resumed(form))


@cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library of this interpreter, or None and the reason why there is none."""
    path = _FOLDER / f"compiled{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if not path.exists():
        return None, _NO_LIBRARY
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"gramgn_{name}")
            function.argtypes, function.restype = (_I, _I, *arguments), _I
        library.gramgn_sources.restype = ctypes.c_char_p
        built_from = library.gramgn_sources().decode()
    except (OSError, AttributeError) as error:
        return None, f"the compiled kernels {path.name} cannot be loaded ({error}): run make kernels"
    sources = sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if sources and digest != built_from:
        return None, f"the compiled kernels {path.name} are not of the present sources: run make kernels"
    return library, None


def _widest(library: ctypes.CDLL) -> str:
    return FORMS[2 - library.gramgn_best_form()]
