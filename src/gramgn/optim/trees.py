"""Tensors inside of arguments and outputs: tuples, lists, dicts, named tuples, dataclasses and other mappings."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Build = Callable[[Sequence[Any]], Any]
"""Builds a structure again from its leaves."""


def flatten(value: Any) -> tuple[list[Any], Build]:
    """Return the leaves of a structure in a fixed order, and the function that builds it again from leaves."""
    if isinstance(value, Tensor):
        return [value], lambda leaves: leaves[0]
    given, structure = pytree.tree_flatten(value)
    parts = [_opened(each) for each in given]
    leaves = [leaf for own, _ in parts for leaf in own]

    def build(leaves: Sequence[Any]) -> Any:
        following = iter(leaves)
        return pytree.tree_unflatten([make([next(following) for _ in own]) for own, make in parts], structure)

    return leaves, build


def _opened(leaf: Any) -> tuple[list[Any], Build]:
    """Return the leaves of what torch takes for one leaf."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        inner, build = flatten(
            {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
        )
        return inner, lambda leaves: replace(leaf, **build(leaves))
    if isinstance(leaf, UserDict):
        inner, build = flatten(leaf.data)

        def rebuilt(leaves: Sequence[Any]) -> Any:
            new = copy.copy(leaf)
            new.data = build(leaves)
            return new

        return inner, rebuilt
    return [leaf], lambda leaves: leaves[0]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a structure."""
    return (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a structure with `function` applied to each of its tensors."""
    leaves, build = flatten(value)
    return build([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
