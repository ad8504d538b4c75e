"""One run as figures, tables and claims see it, whether it was read from its folder or from a results CSV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gramgn.records import Row, code_versions

OPTIMIZER_NAMES = {
    "ggn": "GGN",
    "ggn_spring": "GGN, SPRING",
    "ggn_lm": "GGN, LM damping",
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon",
}
MODEL_NAMES = {"resnet_fixup": "ResNetFixup", "resnet_bn": "ResNetBN", "resnet_gn": "ResNetGN"}

# Settings that have a column of their own in a results CSV; the rest is told apart by OTHER_SETTINGS alone.
OWN_SETTINGS = (
    "model.depth",
    "optimizer.lr",
    "optimizer.lam",
    "optimizer.alpha",
    "optimizer.damping_convention",
    "optimizer.momentum",
    "trainer.epochs",
    "trainer.batch_size",
    "threads",
)
OTHER_SETTINGS = "other_settings"

# Entries of a configuration that do not make it another experiment.
_NOT_SETTINGS = {
    "seed",
    "name",
    "on_failure",
    "resume",
    "tracking",
    "recipe",
    "trainer.scale",
    "trainer.device",
    "trainer.threads",
    "trainer.deterministic",
    "dataset.root",
    "dataset.prepared_root",
    "dataset.workers",
}


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        path: Its folder, relative to the searched one.
        record: The content of ``run.json``, or what a results CSV holds of it.
        rows: The rows of ``metrics.csv``.
    """

    path: str
    record: Mapping[str, Any]
    rows: list[Row]

    @property
    def optimizer(self) -> str:
        """Name of the optimizer's choice, e.g. ``"ggn"``."""
        return str(self.part("optimizer").get("name", "?"))

    @property
    def model(self) -> str:
        """Name of the network's choice, e.g. ``"resnet_fixup"``."""
        return str(self.part("model").get("name", "?"))

    @property
    def label(self) -> str:
        """What was trained with what, e.g. ``"GGN on ResNetFixup"``."""
        optimizer = OPTIMIZER_NAMES.get(self.optimizer, self.optimizer)
        return f"{optimizer} on {MODEL_NAMES.get(self.model, self.model)}"

    @property
    def experiment(self) -> str | None:
        """Name below ``conf/experiment``, e.g. ``"fig1/afad_sgd_bn"``; ``None`` if none was chosen."""
        return self.part("choices").get("experiment") or None

    @property
    def sweep(self) -> str | None:
        """Name of the named sweep, e.g. ``"lambda_alpha"``; ``None`` if none was chosen."""
        return self.part("choices").get("sweep") or None

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.record.get("seed"))

    @property
    def state(self) -> str:
        """One of the states of a run, e.g. ``"done"``."""
        return str(self.record["state"])

    @property
    def diverged(self) -> bool:
        """Whether the run ended by a non-finite loss or step."""
        return self.state == "diverged"

    @property
    def began(self) -> str:
        """UTC time of the first start, as text that sorts."""
        starts = self.record.get("starts") or [{}]
        return str(starts[0].get("time_utc", ""))

    @property
    def scale(self) -> str | None:
        """``trainer.scale``, e.g. ``"laptop"``."""
        return (self.part("config").get("trainer") or {}).get("scale")

    @property
    def num_images(self) -> int | None:
        """Images used, all splits together; ``None`` if the record does not tell."""
        return (self.part("dataset").get("summary") or {}).get("used")

    @property
    def code(self) -> str:
        """Version of the code, ``"unknown"`` outside a repository; of a resumed run all it went through."""
        return " then ".join(code_versions(self.record))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that makes this another experiment than its neighbour, by dotted name; not the seed."""
        found = {key: value for key, value in flat(self.part("config")).items() if not _is_incidental(key)}
        if self.experiment is not None and not self._chose_its_start:
            # The experiment says what to start from; each seed's own network has another path.
            found.pop("init_from", None)
        if self.part("device").get("kind") == "cpu":
            found["threads"] = self.record.get("threads")
        if OTHER_SETTINGS in self.record:
            found[OTHER_SETTINGS] = self.record[OTHER_SETTINGS]
        return found

    @property
    def _chose_its_start(self) -> bool:
        return any(str(word).startswith("init_from=") for word in self.record.get("overrides") or ())

    @cached_property
    def own_settings(self) -> dict[str, Any]:
        """The settings that a results CSV has columns for: numbers as floats, else text; ``None``: not there."""
        found = {name: as_number(self.settings.get(name)) for name in OWN_SETTINGS}
        return {
            name: value if value is None or isinstance(value, float) else str(value)
            for name, value in found.items()
        }

    @cached_property
    def other_settings(self) -> str:
        """Twelve digits that are equal for runs that differ in nothing but :data:`OWN_SETTINGS` and the seed."""
        if OTHER_SETTINGS in self.record:
            return str(self.record[OTHER_SETTINGS])
        rest = {name: as_number(value) for name, value in self.settings.items() if name not in OWN_SETTINGS}
        return digest(rest)[:12]

    def setting_key(self, *without: str) -> str:
        """Return a text that is equal for runs of the same setting, whatever their seeds.

        Args:
            *without: Names of :data:`OWN_SETTINGS` that may differ.
        """
        own = {name: value for name, value in self.own_settings.items() if name not in without}
        return json.dumps([self.optimizer, self.model, own, self.other_settings], sort_keys=True, default=str)

    @property
    def data_key(self) -> str:
        """A text that is equal for runs on the same images at the same size."""
        dataset = self.part("dataset")
        manifest = str(dataset.get("manifest_sha256"))[:12]
        parts = [dataset.get("name"), dataset.get("kind"), dataset.get("image_size"), manifest]
        return json.dumps([*parts, self.num_images], default=str)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that a figure may show of this run; not its path."""
        device = [self.part("device").get(name) for name in ("kind", "name")]
        choices = [self.experiment, self.sweep, self.scale, self.code, self.part("dataset").get("unit")]
        settings = sorted((name, as_number(value)) for name, value in self.settings.items())
        seen = [self.setting_key(), self.data_key, self.seed, self.state, device, choices, settings]
        return digest([*seen, [list(row.values()) for row in self.rows]])

    def part(self, name: str) -> Mapping[str, Any]:
        """Return an entry of ``run.json`` that is itself a mapping; empty where it is missing."""
        value = self.record.get(name)
        return value if isinstance(value, Mapping) else {}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as one of dotted names.

    Args:
        tree: The mapping.
        prefix: What stands before every name, its dot included.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def digest(value: Any) -> str:
    """Return the SHA-256 of anything made of plain types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _is_incidental(key: str) -> bool:
    return key in _NOT_SETTINGS or key.split(".")[0] in _NOT_SETTINGS


def as_number(value: Any) -> Any:
    """Return a whole number as a float: ``optimizer.lam=1`` on a command line is the 1.0 of a file."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
