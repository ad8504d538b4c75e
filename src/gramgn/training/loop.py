"""The loop: epochs of steps, evaluation, records, checkpoints, and every way a run can end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gramgn.damping import alpha_to_sum
from gramgn.errors import ConfigError, InputError, first_line
from gramgn.optim import StepInfo
from gramgn.records import AVERAGE_COLUMNS, Row, RunFolder
from gramgn.stopping import StopAtOnce, StopFlag, StopRequested
from gramgn.training.augment import Augmentation
from gramgn.training.checkpoint import Checkpoints
from gramgn.training.clock import Clock
from gramgn.training.config import TrainerConfig
from gramgn.training.data import TensorData
from gramgn.training.device import PeakMemory, epoch_order, rng_state, set_rng_state
from gramgn.training.meter import EpochMeter
from gramgn.training.modes import evaluation_mode
from gramgn.training.ranks import ALONE, Ranks
from gramgn.training.reporter import Reporter
from gramgn.training.schedule import Schedule
from gramgn.training.steps import Stepper, residuals


class Diverged(RuntimeError):  # noqa: N818 - an outcome that is recorded, not an error
    """A loss or a step was not finite. The network is as it was before that step, and was not saved since."""


@dataclass
class Best:
    """The epoch with the lowest validation loss so far, the first of equals."""

    epoch: int = 0
    val_loss: float = math.inf
    val_mae: float = math.nan
    test_loss: float = math.nan
    test_mae: float = math.nan


@dataclass
class Position:
    """Progress of a run: `epoch` whole epochs, `batch` batches of the next one, `step` steps in total."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    meter: EpochMeter = field(default_factory=EpochMeter)
    best: Best = field(default_factory=Best)


@dataclass(frozen=True)
class Evaluation:
    """The errors on one split.

    Attributes:
        loss: Mean squared error in standardised units.
        mae: Mean absolute error in the data's unit.
    """

    loss: float
    mae: float


def evaluate(
    model: nn.Module,
    data: TensorData,
    split: str,
    *,
    batch_size: int,
    between: Callable[[], None],
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Evaluate `model` on a split, in evaluation mode and without gradients; the modes are restored.

    Args:
        model: The network.
        data: The data set.
        split: `"train"`, `"val"` or `"test"`.
        batch_size: Number of samples per forward pass.
        between: Called between batches, equally often on all ranks; may raise to stop.
        ranks: The processes that evaluate, each its part of the split.
    """
    squared = absolute = 0.0
    count = data.size(split)
    begin, end, longest = ranks.span(count)
    with evaluation_mode(model), torch.no_grad():
        for start in range(begin, begin + longest, batch_size):
            if start < end:
                residual = residuals(model, *data.batch(split, slice(start, min(start + batch_size, end))))
                squared += float(residual.square().sum())
                absolute += float(residual.abs().sum())
            between()
    squared, absolute = ranks.sums(squared, absolute)
    return Evaluation(loss=squared / count, mae=absolute / count * data.scaling.target_std)


class Trainer:
    """Trains one network with one optimizer on one data set, into one run folder.

    Args:
        model: The network, on its device. Each of its modules is trained in the mode that it has.
        optimizer: Either kind, see `gramgn.training.takes_model`.
        data: The data set, on the same device.
        config: The trainer's settings.
        seed: The run's seed; the order of the data is a function of it and the epoch.
        folder: The run's folder, which receives metrics.csv and the checkpoints.
        identity: Identifies the run and its configuration; kept in its checkpoints.
        clock: Started with the job, so that its start-up part covers everything before the first step.
        mirror: Called with each new row of metrics.csv once its checkpoint is on disk.
        reporter: Shows the progress to a person.
        schedule: Sets the optimizer's values before each step; None leaves them alone.
        augment: Changes the training images; None leaves them alone.
        observe: Returns further columns of metrics.csv after a number of epochs, see `config.theory_every`.
        ranks: The processes that train; each takes its share of every batch, and rank 0 writes.

    Raises:
        ConfigError: Every batch would be too small for the network, or the schedule does not fit the run's length.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: TensorData,
        config: TrainerConfig,
        *,
        seed: int,
        folder: RunFolder,
        identity: str,
        clock: Clock,
        mirror: Callable[[list[Row]], None],
        reporter: Reporter,
        schedule: Schedule | None = None,
        augment: Augmentation | None = None,
        observe: Callable[[int], Mapping[str, float | None]] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._observe, self._schedule, self._augment = observe, schedule, augment
        self.model, self.optimizer, self.data, self.config = model, optimizer, data, config
        self.seed, self.folder, self.clock = seed, folder, clock
        self.position = Position()
        self._mirror, self.reporter = mirror, reporter
        self._checkpoints = Checkpoints(folder.checkpoint_dir, identity)
        self._memory = PeakMemory(data.device)
        self._stepper = Stepper(model, optimizer, compile=config.compile, ranks=ranks)
        self._batch_size = config.batch_size_for(data.size("train"))
        self._last_info: StepInfo | None = None
        if schedule is not None:
            schedule.plan(config.epochs, math.ceil(data.size("train") / self._batch_size))
        self._average: AveragedModel | None = None
        if config.average_decay is not None:
            # Buffers are averaged too: the statistics of batch norm then belong to the same steps as the weights.
            average = get_ema_multi_avg_fn(config.average_decay)
            self._average = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        # One sample has no batch statistics; such a last batch is skipped and counted (G05).
        self._least_batch = max(2, ranks.size) if getattr(model, "batch_statistics", False) else 1
        if self._batch_size < self._least_batch:
            raise ConfigError(
                f"trainer.batch_size={self._batch_size}: one sample has no batch statistics, so that "
                f"{type(model).__name__} could take no step; use at least {self._least_batch}"
            )

    def resume(self, *, was_done: bool) -> bool:
        """Restore the last loadable checkpoint and truncate metrics.csv to it; return False if there is none yet.

        Args:
            was_done: Whether the run had finished; then there must be a checkpoint.

        Raises:
            InputError: No checkpoint fits the run, or metrics.csv lacks epochs before it; the records stay
                unchanged.
        """
        state = self._ranks.from_first(lambda: self._last_state(was_done=was_done))
        if state is None:
            self.folder.truncate_metrics(-1)
            return False
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self._average is not None:
                self._average.load_state_dict(state["average"])
            self.clock.resume(state["clock"])
            if self._ranks.is_first:
                set_rng_state(state["rng"])
            meter, best = EpochMeter(**state["meter"]), Best(**state["best"])
            self.position = Position(state["epoch"], state["batch"], state["step"], meter, best)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the checkpoint does not fit this run: {first_line(error)}") from error
        self.folder.truncate_metrics(state["epoch"])
        return True

    def _last_state(self, *, was_done: bool) -> dict[str, Any] | None:
        """Return the last loadable checkpoint if the records reach it, None if there is none yet."""
        state = self._checkpoints.load(self.reporter.say)
        recorded = {int(row["epoch"] or 0) for row in self.folder.read_metrics()}
        if state is None:
            if was_done or max(recorded, default=0) > 1:
                raise InputError(
                    f"{self.folder.metrics_csv} has {len(recorded)} epochs, but the checkpoints are gone from "
                    f"{self.folder.checkpoint_dir}: put them back, or start a new run"
                )
            return None
        lost = sorted(set(range(1, state["epoch"] + 1)) - recorded)
        if lost:
            raise InputError(
                f"{self.folder.metrics_csv} lacks epoch {lost[0]}, which the checkpoint (epoch {state['epoch']}) "
                "comes after: put the file back, or start a new run"
            )
        return state

    def fit(self, stop: StopFlag) -> None:
        """Train until `config.epochs` epochs are done.

        Args:
            stop: Checked after every step and between evaluation batches.

        Raises:
            Diverged: A loss or step is not finite. The row of that epoch is recorded.
            StopRequested: `stop` was set. A checkpoint in mid-epoch has been written.
            InputError: The disk is full, or the network's outputs do not fit the targets.
        """
        self._begin_report()
        self._ranks.seed(self.seed, self.position.step)
        if not self.model.training:
            self.reporter.say(
                f"note: {type(self.model).__name__} was built in evaluation mode and is trained in it (no dropout, "
                "running statistics as they are); call .train() on it where it is built to train it in training mode"
            )
        with self.clock.part("startup"):
            self._stepper.prepare(self._batches_of_each_shape())
        if self._observe is not None and self.position.step == 0:
            with self.clock.part("log"):
                self.folder.append_metrics({"epoch": 0, "step": 0, **self._observe(0)})
        while self.position.epoch < self.config.epochs:
            try:
                self._train_epoch(stop)
                row = self._evaluated_row(stop)
            except Diverged:
                self._record_last(self._train_row())
                raise
            except StopAtOnce:
                raise
            except StopRequested:
                with self.clock.part("checkpoint"):
                    self._save(is_best=False)
                raise
            self._finish_epoch(row)

    def _begin_report(self) -> None:
        data, config = self.data, self.config
        n = data.size("train")
        self.reporter.begin(
            config.epochs,
            total_steps=math.ceil(n / self._batch_size) * config.epochs,
            done_steps=self.position.step,
            # A forward pass takes about a third of a step, and val and test get one per evaluated epoch.
            eval_share=(data.size("val") + data.size("test")) / n / 3 / config.eval_every,
            is_large=config.scale == "paper" and data.device.type == "cpu",
        )

    def _batches_of_each_shape(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield one whole batch, and the last one if it is smaller."""
        whole = self._batch_size
        for size in (whole, self.data.size("train") % whole):
            if size >= self._least_batch:
                yield self.data.batch("train", slice(0, size))

    def _train_epoch(self, stop: StopFlag) -> None:
        position, config = self.position, self.config
        epoch = position.epoch + 1
        with self.clock.part("train"):
            order = epoch_order(self.data.size("train"), seed=self.seed, epoch=epoch, order=config.order)
            batches = order.to(self.data.device).split(self._batch_size)
            for index in batches[position.batch :]:
                self._ranks.agree(stop)
                if len(index) < self._least_batch:
                    position.meter.skipped_batches += 1
                else:
                    self._step(index)
                position.batch += 1
            self._ranks.meet()
        with self.clock.part("log"):
            position.meter.close(self._last_info)

    def _step(self, index: torch.Tensor) -> None:
        position, augment = self.position, self._augment
        if self._schedule is not None:
            self._schedule.apply(position.epoch, position.batch)
        mine = self._ranks.share(index)
        change = None if augment is None else lambda images: augment(images, mine, position.epoch + 1)
        report = self._stepper(*self.data.batch("train", mine, change), num_samples=len(index))
        position.meter.add(report)
        position.step += 1
        self._last_info = report.info
        self.reporter.step(position.epoch + 1, report.loss)
        if not report.finite:
            what = "loss" if not math.isfinite(report.loss) else "step"
            raise Diverged(
                f"the {what} was not finite at step {position.step} (epoch {position.epoch + 1}, "
                f"loss {report.loss:g})"
            )
        if self._average is not None:
            self._average.update_parameters(self.model)

    def _evaluated_row(self, stop: StopFlag) -> dict[str, Any]:
        row, config = self._train_row(), self.config
        epoch, is_last = row["epoch"], row["epoch"] == config.epochs
        with self.clock.part("eval"):
            if is_last or epoch % config.eval_every == 0:
                self._add_evaluation(row, stop)
            if (
                self._observe is not None
                and config.theory_every
                and (is_last or epoch % config.theory_every == 0)
            ):
                row |= self._observe(epoch)
        return row | {"wall_s": self.clock.wall_s()}

    def _finish_epoch(self, row: dict[str, Any]) -> None:
        position = self.position
        is_best = row.get("val_loss") is not None and row["val_loss"] < position.best.val_loss
        if is_best:
            position.best = Best(**{name: row[name] for name in asdict(position.best)})
        if not all(math.isfinite(row.get(name) or 0.0) for name in ("val_loss", "test_loss")):
            self._record_last(row)
            raise Diverged(f"the evaluation after epoch {row['epoch']} was not finite")
        with self.clock.part("log"):
            self.folder.append_metrics(row)
        position.epoch, position.batch, position.meter = row["epoch"], 0, EpochMeter()
        with self.clock.part("checkpoint"):
            self._save(is_best=is_best)
        with self.clock.part("log"):
            self._mirror([row])
            self.reporter.epoch(row)

    def _record_last(self, row: dict[str, Any]) -> None:
        """Record a row that no checkpoint follows: the epoch in which the run diverged."""
        with self.clock.part("log"):
            self.folder.append_metrics(row)
            self._mirror([row])
            self.reporter.epoch(row)

    def _train_row(self) -> dict[str, Any]:
        settings, meter = self.optimizer.param_groups[0], self.position.meter
        row: dict[str, Any] = {
            "epoch": self.position.epoch + 1,
            "step": self.position.step,
            "train_s": self.clock.train_s(),
            "wall_s": self.clock.wall_s(),
            "lr": float(settings["lr"]) if "lr" in settings else None,
            "peak_mem_mib": self._memory.mib(),
            **meter.row(self.data.scaling.target_std),
        }
        if self._schedule is not None and self._schedule.config.momentum is not None:
            row["momentum"] = float(settings["momentum"])
        if self._average is not None:  # columns of its own, also of an epoch that is not evaluated
            row |= dict.fromkeys(AVERAGE_COLUMNS)
        if "lam" in settings:
            convention, alpha_sum = settings.get("damping_convention", "sum"), meter.alpha_sum
            if (
                meter.alpha is not None and convention != "trace"
            ):  # that of a whole batch, also after a smaller one
                alpha_sum = alpha_to_sum(meter.alpha, convention, num_samples=self._batch_size)
            row |= {"lam": float(settings["lam"]), "alpha": meter.alpha, "alpha_sum": alpha_sum}
        return row

    def _add_evaluation(self, row: dict[str, Any], stop: StopFlag) -> None:
        batch_size, ranks = self.config.eval_batch_size, self._ranks

        def measured(network: nn.Module, split: str) -> Evaluation:
            between = partial(ranks.agree, stop)
            return evaluate(network, self.data, split, batch_size=batch_size, between=between, ranks=ranks)

        for split in ("val", "test", "train") if self.config.eval_train else ("val", "test"):
            result = measured(self.model, split)
            if split == "train":
                row["train_eval_loss"] = result.loss
                continue
            row |= {f"{split}_loss": result.loss, f"{split}_mae": result.mae}
            if self._average is not None:
                result = measured(self._average.module, split)
                row |= {f"average_{split}_loss": result.loss, f"average_{split}_mae": result.mae}

    def _save(self, *, is_best: bool) -> None:
        if not self._ranks.is_first:
            return
        position = self.position
        state = {
            "epoch": position.epoch,
            "batch": position.batch,
            "step": position.step,
            "meter": asdict(position.meter),
            "best": asdict(position.best),
            "clock": self.clock.summary(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaling": asdict(self.data.scaling),
            "rng": rng_state(),
        }
        if self._average is not None:
            state["average"] = self._average.state_dict()
        self._checkpoints.save(state, is_best=is_best)
