"""The training loop: exact clock, exact resume, and every way a run can end."""

from gramgn.training.augment import Augmentation, AugmentConfig
from gramgn.training.checkpoint import BEST, LAST, Checkpoints, load_weights, read_checkpoint
from gramgn.training.clock import Clock
from gramgn.training.config import TrainerConfig
from gramgn.training.data import Scaling, TensorData
from gramgn.training.device import (
    PeakMemory,
    Precision,
    apply_settings,
    choose_device,
    epoch_order,
    rng_state,
    seed_everything,
    set_rng_state,
    synchronize,
    use_channels_last,
)
from gramgn.training.loop import Diverged, Trainer, evaluate
from gramgn.training.modes import evaluation_mode
from gramgn.training.muon import muon_with_adamw, split_for_muon
from gramgn.training.ranks import ALONE, Ranks, join
from gramgn.training.reporter import Reporter
from gramgn.training.schedule import Schedule, ScheduleConfig
from gramgn.training.steps import Stepper, check_compile, residuals, takes_model

__all__ = [
    "ALONE",
    "BEST",
    "LAST",
    "AugmentConfig",
    "Augmentation",
    "Checkpoints",
    "Clock",
    "Diverged",
    "PeakMemory",
    "Precision",
    "Ranks",
    "Reporter",
    "Scaling",
    "Schedule",
    "ScheduleConfig",
    "Stepper",
    "TensorData",
    "Trainer",
    "TrainerConfig",
    "apply_settings",
    "check_compile",
    "choose_device",
    "epoch_order",
    "evaluate",
    "evaluation_mode",
    "join",
    "load_weights",
    "muon_with_adamw",
    "read_checkpoint",
    "residuals",
    "rng_state",
    "seed_everything",
    "set_rng_state",
    "split_for_muon",
    "synchronize",
    "takes_model",
    "use_channels_last",
]
