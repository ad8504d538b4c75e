"""What prepare is asked to do, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What is to be prepared, how, and where.

    Attributes:
        folder: The prepared folder.
        root: Folder of the raw data.
        name: Name of the data set.
        kind: ``"real"`` or ``"synthetic"``.
        unit: Unit of the targets.
        size: Side of the prepared images.
        channels: Channels stored.
        resize: ``"stretch"``, ``"pad"`` or ``"crop"``.
        split_seed: Seed of the split rule.
        on_bad_image: ``"error"`` or ``"skip"``.
        workers: Processes, None for all cores.
        settings: Options of the layout.
        command: Command line that prepares this set, for messages.
    """

    folder: Path
    root: Path
    name: str
    kind: str
    unit: str
    size: int
    channels: int
    resize: str
    split_seed: int
    on_bad_image: str
    workers: int | None
    settings: dict[str, Any]
    command: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``(C, H, W)`` of a prepared image."""
        return (self.channels, self.size, self.size)
