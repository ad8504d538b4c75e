"""What the streaming engine tells its user, once."""

from __future__ import annotations

import warnings

from gramgn.optim._stream._owners import Owner


class Notes:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._types: set[type] = set()

    def fall_back(self, owner: Owner) -> None:
        """Say that modules of a type have no rule."""
        kind = type(owner.module)
        if kind in self._types:
            return
        self._types.add(kind)
        warnings.warn(
            f"GramGaussNewton: no rule for {kind.__name__} (at '{owner.path or 'the model itself'}'): its part "
            "of the Jacobian comes from torch.func on that module, which is right but slower",
            UserWarning,
            stacklevel=2,
        )
