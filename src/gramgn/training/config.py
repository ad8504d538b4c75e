"""The settings of a training run, checked on construction."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Any

from gramgn.errors import ConfigError, is_number, is_whole

ORDERS = ("shuffle", "cyclic")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class TrainerConfig:
    """How long, on what and in which order to train (`conf/trainer/`).

    Attributes:
        scale: Name of the scale that the defaults come from; a label in records and figures, any word.
        epochs: Number of passes over the training split, at least 1.
        batch_size: Number of samples per batch, or `"full"` for the whole training split. The smaller last
            batch of an epoch is used, not dropped.
        image_size: Width and height of the images in pixels.
        order: `"shuffle"`: a permutation that is a function of (seed, epoch). `"cyclic"`: the same
            batches in the same order in every epoch (Theorem 2 of arXiv 1905.11675).
        standardize_targets: Train on (y - mean) / sd with mean and sd of the training split.
        eval_every: Number of epochs between evaluations on val and test; the last epoch is always evaluated.
        eval_train: Also evaluate the training split, after each evaluated epoch.
        eval_batch_size: Number of samples per forward pass of the evaluation.
        device: `"auto"` (CUDA where there is one, else the CPU) or a torch device such as `"cuda:1"`.
        dtype: Of weights, inputs and the Jacobian: `"float32"` or `"float64"`.
        tf32: Let CUDA round to TF32 in convolutions and matrix products outside the Gram product.
        deterministic: Allow only deterministic kernels. CPU runs repeat bit for bit either way.
        threads: Number of CPU threads of torch; None leaves torch's own choice. Recorded with the run.
        channels_last: Keep kernels and batches of images in channels-last memory format, in which convolutions
            are faster. Sums round differently. run.json records what was in force (`precision`): never
            for data other than images, nor for a network that cannot take it.
        average_decay: Decay per step, in (0, 1), of an exponential average of weights and buffers, which is evaluated
            next to the weights (`average_*` of metrics.csv) and kept in checkpoints. None: none.
        theory_every: Number of epochs between measurements of the quantities of the paper's theorems, before the
            first step and at the end as well; for `model=two_layer` in float64. None: never.
        compile: Compile the training step with `torch.compile` (G19). Evaluation is never compiled.

    Raises:
        ConfigError: A value is out of range; the message names all of them.
    """

    scale: str = "paper"
    epochs: int = 30
    batch_size: Any = 128
    image_size: int = 64
    order: str = "shuffle"
    standardize_targets: bool = True
    eval_every: int = 1
    eval_train: bool = False
    eval_batch_size: int = 256
    device: str = "auto"
    dtype: str = "float32"
    tf32: bool = False
    deterministic: bool = False
    threads: int | None = None
    channels_last: bool = True
    compile: bool = False
    average_decay: float | None = None
    theory_every: int | None = None

    def __post_init__(self) -> None:
        least = dict.fromkeys(("epochs", "eval_every", "eval_batch_size"), 1) | {"image_size": 8}
        least |= {name: 1 for name in ("threads", "theory_every") if getattr(self, name) is not None}
        problems = [
            f"trainer.{name}={getattr(self, name)!r} must be a whole number of at least {minimum}"
            for name, minimum in least.items()
            if not is_whole(getattr(self, name), minimum)
        ]
        if self.batch_size != "full" and not is_whole(self.batch_size, 1):
            problems.append(
                f"trainer.batch_size={self.batch_size!r} must be a whole number of at least 1, or full"
            )
        for name, allowed in (("order", ORDERS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                problems.append(f"trainer.{name}={given!r} must be one of {', '.join(allowed)}")
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                given = getattr(self, field.name)
                problems.append(f"trainer.{field.name}={given!r} must be true or false")
        for name, example in (("scale", "laptop"), ("device", "auto")):
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.:-]+", value):
                problems.append(f"trainer.{name}={value!r} must be a word, such as {example}")
        if self.average_decay is not None and not (
            is_number(self.average_decay, 0, 1) and self.average_decay > 0
        ):
            problems.append(
                f"trainer.average_decay={self.average_decay!r} must be a number above 0 and below 1, or null"
            )
        most_threads = 4 * (os.cpu_count() or 1)  # far more of them crash torch
        if isinstance(self.threads, int) and self.threads > most_threads:
            problems.append(
                f"trainer.threads={self.threads} must be at most {most_threads}, four per core of this machine"
            )
        if problems:
            raise ConfigError("\n".join(problems))

    def batch_size_for(self, num_train: int) -> int:
        """Return the number of samples in a whole batch of a training split of `num_train` samples."""
        return num_train if self.batch_size == "full" else min(int(self.batch_size), num_train)
