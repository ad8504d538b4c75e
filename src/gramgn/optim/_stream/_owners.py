"""Which module answers for which trained parameter: decided from the structure, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramgn.optim._stream._registry import RULES
from gramgn.optim._stream._rule import Rule

# They read the parameters of their children without calling them.
READ_THEIR_CHILDREN = (nn.MultiheadAttention,)
# They are never called on a batch themselves.
CONTAINERS = (
    parametrize.ParametrizationList,
    nn.ParameterList,
    nn.ParameterDict,
    nn.ModuleList,
    nn.ModuleDict,
)


@dataclass(eq=False)
class Owner:
    """A module and the trained parameters it answers for.

    Attributes:
        path: Its name in the model; empty for the model itself.
        module: The module.
        params: From names within the module to names in the model.
        rule: How its per-sample gradients are computed; None: by ``torch.func`` on this module alone, unless
            all uses of its parameters turn out to be additions and multiplications.
    """

    path: str
    module: nn.Module
    params: dict[str, str] = field(default_factory=dict)
    rule: Rule | None = None


def find_owners(model: nn.Module, params: Mapping[str, Tensor], *, replaced: bool) -> list[Owner]:
    """Return an owner for every place in the model at which a trained parameter sits.

    A parameter tied to several places has several.

    Args:
        model: The network.
        params: The trained parameters by their names in the model.
        replaced: Whether the user replaced the forward of the model itself.
    """
    names = {id(param): name for name, param in params.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[str, Owner] = {}
    for path, module in model.named_modules():
        for local, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in names:
                continue
            at = _answering(path, modules)
            owner = owners.setdefault(at, Owner(at, modules[at]))
            place = f"{path}.{local}".removeprefix(".")
            owner.params[place[len(at) :].removeprefix(".")] = names[id(param)]
    for owner in owners.values():
        rule = RULES.get(type(owner.module))
        # Its forward must be the one that the rule knows, with the parameters under their own names.
        plain = not replaced if owner.module is model else "forward" not in vars(owner.module)
        if rule is not None and plain and set(owner.params) <= rule.params and rule.applies(owner.module):
            owner.rule = rule
    return list(owners.values())


def _answering(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost module at ``path`` or around it whose call uses the parameters."""
    while path:
        parent = path.rpartition(".")[0]
        if path in modules and not _is_bypassed(modules[path], modules.get(parent)):
            return path
        path = parent
    return path


def _is_bypassed(module: nn.Module, parent: nn.Module | None) -> bool:
    return isinstance(module, CONTAINERS) or isinstance(
        parent, (*READ_THEIR_CHILDREN, parametrize.ParametrizationList)
    )
