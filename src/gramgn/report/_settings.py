"""In what a run differs from the others: its configuration against what is usual on the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._entries import Entry

# Groups whose keys mean something only beside the choice: alpha of GGN is not compared with a run of SGD.
_CHOSEN = {
    "dataset": "dataset",
    "model": "model",
    "optimizer": "optimizer",
    "trainer": "trainer",
}


@dataclass(frozen=True)
class Difference:
    """One entry of a configuration that is not the usual one.

    Attributes:
        key: Dotted name, e.g. ``"optimizer.alpha"``.
        value: What the run has.
        usual: What most runs have.
    """

    key: str
    value: str
    usual: str


@dataclass(frozen=True)
class Usual:
    """The usual values of one group's keys.

    Attributes:
        choice: The group and its choice, e.g. ``"optimizer=ggn"``; ``"general"`` for keys outside the groups.
        num_runs: How many runs made this choice.
        values: Dotted name and value, in the order of the configurations.
    """

    choice: str
    num_runs: int
    values: Mapping[str, str]


class UsualSettings:
    """What most runs of the page have, group by group and choice by choice.

    The page cannot compose ``conf/`` (that needs Hydra, and the ``conf/`` of the day need not be the one a run was
    made with), so a run is compared with its neighbours: for every key the value that most runs with the same
    choice have; among equally frequent ones that of the run that comes first by path.

    Args:
        entries: All runs of the page, ordered by path.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._runs: dict[str, int] = {}
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for entry in entries:
            flat = flat_config(entry)
            for choice in dict.fromkeys(_choice(entry, key) for key in flat):
                self._runs[choice] = self._runs.get(choice, 0) + 1
            for key, value in flat.items():
                values = counts.setdefault(_choice(entry, key), {}).setdefault(key, {})
                values[value] = values.get(value, 0) + 1
        # max returns the first of equals, and dictionaries keep the order in which values were met.
        self._usual = {
            choice: {key: max(values, key=lambda value: values[value]) for key, values in keys.items()}
            for choice, keys in counts.items()
        }

    def groups(self) -> list[Usual]:
        """Return the usual values, the general ones first, then by group and choice."""
        return [
            Usual(choice, self._runs[choice], self._usual[choice])
            for choice in sorted(self._usual, key=lambda choice: (choice != "general", choice))
        ]

    def differences(self, entry: Entry) -> list[Difference]:
        """Return the entries of a run's configuration that are not the usual ones.

        Args:
            entry: One of the runs this was made of.
        """
        flat = flat_config(entry)
        found = []
        for key, value in flat.items():
            usual = self._usual[_choice(entry, key)][key]
            if value != usual:
                found.append(Difference(key, value, usual))
        return found


def flat_config(entry: Entry) -> dict[str, str]:
    """Return a run's configuration as dotted names with values as JSON writes them.

    Args:
        entry: A run; one without a configuration has no entries.
    """
    config = entry.get("config")
    return dict(_flat(config, "")) if isinstance(config, Mapping) else {}


def plain(value: Any) -> str:
    """Return a value of a configuration as text: strings as they are, the rest as JSON writes it.

    Args:
        value: A plain JSON value.
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(tree: Mapping[str, Any], prefix: str) -> Sequence[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", plain(value)))
    return pairs


def _choice(entry: Entry, key: str) -> str:
    group = _CHOSEN.get(key.split(".")[0])
    if group is None:
        return "general"
    return f"{group}={entry.get('choices', group) or entry.get(group, 'name') or '?'}"
