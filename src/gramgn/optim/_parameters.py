"""Which parameters of the model a step trains, by their names in the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gramgn.optim._guards import check_parameters


@dataclass(frozen=True)
class Trained:
    """The parameters that a step trains.

    Attributes:
        params: By their names in the model.
        groups: The number of each one's parameter group, in the same order.
        num_groups: How many groups the optimizer has; some may have nothing to train.
    """

    params: dict[str, Tensor]
    groups: tuple[int, ...]
    num_groups: int


def trainable(model: nn.Module, grouped: Sequence[Sequence[Tensor]], *, everything: bool) -> Trained:
    """Return the optimizer's parameters that require gradients now.

    Args:
        model: The network.
        grouped: The optimizer's parameters by group.
        everything: Whether they are meant to be all that the model has to train.

    Raises:
        ValueError: None is left, one is not part of the model, or the model has others although
            ``everything``.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    foreign = [param for group in grouped for param in group if id(param) not in names]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the optimizer's parameters (the first of shape {list(foreign[0].shape)}) are "
            "not parameters of the model that was given: pass parameters of that model, and build a new "
            "optimizer after replacing a module. Copy the two together: copy.deepcopy((model, optimizer))"
        )
    group_of = {id(param): number for number, group in enumerate(grouped) for param in group}
    new = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in group_of]
    if everything and new:
        raise ValueError(
            f"the model has trainable parameters that this optimizer does not know ({', '.join(new)}), "
            "because they were added or unfrozen after it was built: build a new optimizer"
        )
    params = {names[id(p)]: p for group in grouped for p in group if p.requires_grad}
    if not params:
        raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to train")
    check_parameters(params)
    return Trained(params, tuple(group_of[id(p)] for p in params.values()), len(grouped))
