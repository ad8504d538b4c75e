"""The training loop: exact clock, exact resume, and every way a run can end."""

from gramgn.training._checkpoint import Checkpoints, digest, load_weights
from gramgn.training._clock import Clock
from gramgn.training._config import TrainerConfig
from gramgn.training._data import Scaling, TensorData
from gramgn.training._device import (
    Precision,
    apply_settings,
    choose_device,
    release_memory,
    synchronize,
)
from gramgn.training._evaluate import Evaluation, evaluate
from gramgn.training._loop import Best, Diverged, Trainer
from gramgn.training._memory_format import use_channels_last
from gramgn.training._muon import muon_with_adamw, split_for_muon
from gramgn.training._report import Reporter
from gramgn.training._seeding import epoch_order, rng_state, seed_everything, set_rng_state
from gramgn.training._steps import Stepper, StepReport, check_compile, residuals, takes_model

__all__ = [
    "Best",
    "Checkpoints",
    "Clock",
    "Diverged",
    "Evaluation",
    "Precision",
    "Reporter",
    "Scaling",
    "StepReport",
    "Stepper",
    "TensorData",
    "Trainer",
    "TrainerConfig",
    "apply_settings",
    "check_compile",
    "choose_device",
    "digest",
    "epoch_order",
    "evaluate",
    "load_weights",
    "muon_with_adamw",
    "release_memory",
    "residuals",
    "rng_state",
    "seed_everything",
    "set_rng_state",
    "split_for_muon",
    "synchronize",
    "takes_model",
    "use_channels_last",
]
