"""Which parameters of the model a step trains, by their names in the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gramgn.optim._guards import check_parameters


def trainable(model: nn.Module, grouped: Sequence[Tensor], *, everything: bool) -> dict[str, Tensor]:
    """Return the optimizer's parameters that require gradients now, by name.

    Args:
        model: The network.
        grouped: The optimizer's parameters.
        everything: Whether they are meant to be all that the model has to train.

    Raises:
        ValueError: None is left, one is not part of the model, or the model has others although
            ``everything``.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    foreign = [param for param in grouped if id(param) not in names]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the optimizer's parameters (the first of shape {list(foreign[0].shape)}) are "
            "not parameters of the model that was given: pass parameters of that model, and build a new "
            "optimizer after replacing a module. Copy the two together: copy.deepcopy((model, optimizer))"
        )
    known = {id(param) for param in grouped}
    new = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if everything and new:
        raise ValueError(
            f"the model has trainable parameters that this optimizer does not know ({', '.join(new)}), "
            "because they were added or unfrozen after it was built: build a new optimizer"
        )
    params = {names[id(param)]: param for param in grouped if param.requires_grad}
    if not params:
        raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to train")
    check_parameters(params)
    return params
