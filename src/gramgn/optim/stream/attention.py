"""What `nn.MultiheadAttention` consists of: linear layers, between which nothing is trained.

The functions of torch that compute it run with a `linear` in their namespace that records each projection as a layer.
So masks, dropout and the kernels of attention are torch's own, and nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation

from gramgn.optim.stream.blocks import Block, Layout


class Part(nn.Module):
    """A linear layer inside another module, whose weight and bias may be some rows of that module's parameters.

    Without a weight, a bias alone that is repeated for each sample.

    Args:
        places: For `weight` and `bias`, as far as there are: the parameter's name in the outer module, its shape, and
            the rows.
    """

    def __init__(self, places: dict[str, tuple[str, tuple[int, ...], slice]]) -> None:
        super().__init__()
        self.places = places
        self.is_whole = all(rows == slice(0, shape[0]) for _, shape, rows in places.values())
        _, shape, rows = next(iter(places.values()))
        self.in_features, self.out_features = shape[-1], rows.stop - rows.start

    def padded(self, local: str, block: Tensor) -> Block:
        """Return the rows' gradients [b, rows, ...] among zeros, as gradients of the whole parameter."""
        _, shape, rows = self.places[local]
        padded = block.new_zeros(len(block), *shape)
        padded[:, rows] = block.view(padded[:, rows].shape)
        return Block(padded.view(1, len(block), -1), Layout(shape, tuple(range(len(shape)))))


class Projections:
    """Runs an `nn.MultiheadAttention`, and records its projections and its biases of keys and values.

    Args:
        module: The module.
        record: Takes a part, its input and its output.
    """

    def __init__(self, module: nn.Module, record: Callable[[Part, Tensor, Tensor], None]) -> None:
        self._params = {
            id(param): (name, param) for name, param in module.named_parameters(remove_duplicate=False)
        }
        self._record = record
        namespace = {**vars(functional), "linear": self._linear}
        for name in ("_in_projection", "_in_projection_packed"):
            namespace[name] = _moved(getattr(functional, name), namespace)
        self._attention = _moved(functional.multi_head_attention_forward, namespace)
        namespace["multi_head_attention_forward"] = self._with_biases
        self._namespaces = namespace, {**vars(activation), "F": SimpleNamespace(**namespace)}
        self._module = module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, once."""
        try:
            return _moved(nn.MultiheadAttention.forward, self._namespaces[1])(self._module, *args, **kwargs)
        finally:
            # Functions and the namespaces that hold them would keep alive what records, with all memory for J.
            for namespace in self._namespaces:
                namespace.clear()

    def _with_biases(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands for `multi_head_attention_forward`."""
        biases = (7, 8)
        return self._attention(
            query, *(self._bias(arg) if i in biases else arg for i, arg in enumerate(args, 1)), **kwargs
        )

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = functional.linear(x, weight, bias)
        places = {"weight": self._place(weight)} | ({} if bias is None else {"bias": self._place(bias)})
        self._record(Part(places), x, y)
        return y

    def _bias(self, bias: Tensor | None) -> _Bias | None:
        """Return what `multi_head_attention_forward` repeats for each sample and appends to the keys or values."""
        if bias is None:
            return None
        part = Part({"bias": self._place(bias)})
        return _Bias(bias, lambda y: self._record(part, y, y))

    def _place(self, tensor: Tensor) -> tuple[str, tuple[int, ...], slice]:
        """Return the parameter of which a tensor is some rows, its shape, and the rows."""
        base = tensor if id(tensor) in self._params else tensor._base
        name, param = self._params[id(base)]
        start = (tensor.storage_offset() - param.storage_offset()) // param.stride(0)
        return name, tuple(param.shape), slice(start, start + len(tensor))


class _Bias:
    """A parameter that reports what it is repeated to."""

    def __init__(self, param: Tensor, report: Callable[[Tensor], None]) -> None:
        self._param, self._report = param, report

    def repeat(self, *sizes: int) -> Tensor:
        """Return the repeated parameter."""
        repeated = self._param.repeat(*sizes)
        self._report(repeated)
        return repeated


def _moved(function: Any, namespace: dict[str, Any]) -> Any:
    """Return a function of torch that looks for its globals in another namespace."""
    moved = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    moved.__kwdefaults__ = function.__kwdefaults__
    return moved
