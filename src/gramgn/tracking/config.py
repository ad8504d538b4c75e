"""The settings of the W&B mirror."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gramgn.errors import ConfigError, checked_choice

MODES = ("offline", "online", "none")


@dataclass(frozen=True)
class TrackingConfig:
    """Where the mirror of a run goes (`conf/tracking/`).

    Raises:
        ConfigError: A value is not valid.
    """

    mode: str = "offline"  # W&B's files, no account; or "online", or "none"
    project: str = "gramgn"
    entity: str | None = None  # W&B team or user; None is the account's default
    init_timeout_s: float = 30.0  # longest wait for W&B at the start
    finish_timeout_s: float = 60.0  # longest wait for the last upload

    def __post_init__(self) -> None:
        checked_choice("tracking.mode", self.mode, MODES)
        for name in ("init_timeout_s", "finish_timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ConfigError(f"tracking.{name}={value!r} must be a number of seconds above 0")
        if not isinstance(self.project, str) or not self.project:
            raise ConfigError(f"tracking.project={self.project!r} must be the name of a W&B project")
