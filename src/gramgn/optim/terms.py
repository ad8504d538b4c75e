"""Residuals of any kind: a step on several terms, each a function of the network and of one sample.

b_t samples and weight w_t of term t, k residuals per sample. With B = sum_t b_t, the rows of a term in r and J are
scaled by sqrt(w_t B / b_t) in the conventions `"mean"` and `"trace"`, which is the mean over each term's samples next
to a damping that is multiplied by B, and by sqrt(w_t) in the convention `"sum"`. One term of weight 1 is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.settings import check_number
from gramgn.optim.trees import flatten, map_tensors, tensors_in


@dataclass(frozen=True, init=False, eq=False)
class Term:
    """Residuals of one kind: `Term(function, x, y, ..., weight=1.0)`, or `Term(closure, weight=1.0)`.

    `function(u, x, y, ...)` is called once per sample: with the network as a function of one sample and one sample of
    each argument. It returns a number, k numbers [k], or a tuple or dict of them. It may call `u` several times and
    differentiate it with `torch.func`. `u` has the attributes and items of the model: parts of it are functions of
    one sample as well, parameters are tensors. See `OneSample`.

    A term without samples is a closure as `step(closure)` takes it: it calls the model on a batch, and its J is
    formed by the optimizer's engine. That is faster where the residuals are an ordinary call of a large network.

    Args:
        function: Returns the residuals of one sample; without samples, of a whole batch.
        samples: Tensors, or tuples, dicts and dataclasses of tensors, with one entry per sample in the leading
            dimension. Everything that all samples share belongs into `function`.
        weight: Weight of the term's mean square in the loss, >= 0; default 1.

    Raises:
        ValueError: The number of samples is 0 or differs between tensors, or `weight` is out of range.
    """

    function: Callable[..., Any]
    samples: tuple[Any, ...] = field(repr=False)
    weight: float

    def __init__(self, function: Callable[..., Any], *samples: Any, weight: float = 1.0) -> None:
        if isinstance(function, nn.Module) or not callable(function):
            raise ValueError(
                "the first argument of a Term must be a function (u, *sample) that returns residuals, got "
                f"{type(function).__name__}"
            )
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(
            self, "weight", check_number(f"the weight of term {self.name!r}", weight, least=0.0)
        )
        if samples:
            self._check_samples()

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self._given, "__name__", type(self._given).__name__)

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What identifies its function and the shapes of its samples from step to step."""
        code: Any = getattr(self._given, "__code__", type(self._given))
        return (code, *(tensor.shape[1:] for tensor in self.tensors))

    @property
    def _given(self) -> Callable[..., Any]:
        """The function without the arguments that `functools.partial` has bound to it."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        return function

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all arguments, each [b, ...]."""
        return [tensor.detach() for tensor in tensors_in(self.samples)]

    @property
    def num_samples(self) -> int:
        """The number of samples b; 0 for a closure, whose batch is not known."""
        return len(self.tensors[0]) if self.samples else 0

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments with `tensors` in place of their own."""
        given = iter(tensors)
        return map_tensors(self.samples, lambda _: next(given))

    def _check_samples(self) -> None:
        shapes = [list(tensor.shape) for tensor in self.tensors]
        if not shapes or any(not shape for shape in shapes):
            raise ValueError(
                f"term {self.name!r} needs tensors with one entry per sample in dimension 0, got "
                f"{shapes or [type(each).__name__ for each in self.samples]}: Term(function, x, ...) with x [b, ...]. "
                "Let the function itself hold what all samples share"
            )
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                f"the tensors of term {self.name!r} must have one entry per sample in dimension 0 each, got {shapes}. "
                "Let the function itself hold what all samples share"
            )
        if shapes[0][0] == 0:
            raise ValueError(f"term {self.name!r} has no samples, got {shapes}: leave it out of this step")


class OneSample:
    """A module as a function of one sample.

    It is called with tensors without the batch dimension, as `module` is with a batch of one, and returns tensors (or
    tuples, dicts and dataclasses of tensors) without it; a call without tensors is the module's own. Attributes, items
    and iteration are those of the module: modules among them are functions of one sample too, and so are methods;
    parameters and buffers are tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on a batch of one sample."""
        return _of_one(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the module has under this name."""
        value = getattr(self._module, name)
        if isinstance(self._module, nn.ModuleDict) and name in ("items", "values"):
            seen = {key: _seen(part) for key, part in self._module.items()}
            return getattr(seen, name)
        if ismethod(value):
            return lambda *args, **kwargs: _of_one(value, args, kwargs)
        return _seen(value)

    def __getitem__(self, key: Any) -> Any:
        """Return an item of a list or dict of modules or parameters."""
        return _seen(self._module[key])  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the modules or parameters of a list, over the names of a dict."""
        return (_seen(part) for part in self._module)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._module)  # type: ignore[arg-type]

    def __contains__(self, key: Any) -> bool:
        """Return whether a dict of modules has this name."""
        return key in self._module  # type: ignore[operator]

    def __repr__(self) -> str:
        """Show the module."""
        return f"OneSample({self._module!r})"


def _seen(value: Any) -> Any:
    return OneSample(value) if isinstance(value, nn.Module) else value


def _of_one(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module or one of its methods on a batch of one sample."""

    def first(output: Tensor) -> Tensor:
        if output.ndim == 0 or len(output) != 1:
            raise ValueError(
                f"the model returned {list(output.shape)} for a batch of one sample: its output must keep the batch "
                "in the leading dimension. In a term, the model is a function of one sample, u(x) = model(x[None])[0]"
            )
        return output[0]

    if next(tensors_in((args, kwargs)), None) is None:
        return call(*args, **kwargs)
    args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor[None])
    return map_tensors(call(*args, **kwargs), first)


class Residual(nn.Module):
    """The residuals of a term's samples, as a module whose parameters `torch.func.functional_call` can replace."""

    def __init__(self, model: nn.Module, term: Term) -> None:
        super().__init__()
        self.model, self.term = model, term

    def forward(self, *sample: Tensor) -> Tensor:
        """Return the residuals of one sample, [k], or a number where the term's function does."""
        returned = self.term.function(OneSample(self.model), *self.term.arguments(sample))
        parts = [self._checked(part) for part in flatten(returned)[0]]
        if not sum(part.numel() for part in parts):
            raise ValueError(f"term {self.term.name!r} returned nothing: it must return residuals")
        return (
            parts[0] if len(parts) == 1 and parts[0].ndim == 0 else torch.cat([p.reshape(-1) for p in parts])
        )

    def _checked(self, part: Any) -> Tensor:
        if isinstance(part, (int, float)) and not isinstance(part, bool):
            like = next(self.model.parameters())
            return torch.tensor(float(part), dtype=like.dtype, device=like.device)
        if not isinstance(part, Tensor) or not part.is_floating_point():
            given = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(
                f"term {self.term.name!r} must return real numbers that depend on the model through "
                f"autograd, got {given}"
            )
        return part


def check_terms(terms: Any) -> list[Term]:
    """Return the terms of a step as a list."""
    given = list(terms) if isinstance(terms, (list, tuple)) else [terms]
    wrong = next((each for each in given if not isinstance(each, Term)), None)
    if not given or wrong is not None:
        raise ValueError(
            "terms must be one or several of gramgn.Term, as in step(terms=[Term(residual, x)]), got "
            f"{type(wrong).__name__ if given else 'none'}"
        )
    return given
