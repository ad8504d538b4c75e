"""One run from configuration to records."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramgn.app.build import build, build_dataset, target_class
from gramgn.app.config import check_entries
from gramgn.app.paths import shown
from gramgn.app.plan import Job, run_folder, write_local_paths
from gramgn.app.recording import (
    MAY_LIE_THERE,
    Recording,
    dataset_record,
    first_record,
    optimizer_record,
    outcome,
)
from gramgn.app.trained import load_state
from gramgn.damping import alpha_to_sum
from gramgn.errors import ConfigError, DataError, InputError, JobFailedError, counted, first_line
from gramgn.optim import BudgetError, is_out_of_memory, kernels
from gramgn.progress import say
from gramgn.records import RunFolder, UnwrittenFolder, checkpoint_identity
from gramgn.stopping import deferred_signals
from gramgn.tracking import TrackingConfig
from gramgn.training import (
    ALONE,
    BEST,
    Augmentation,
    AugmentConfig,
    Clock,
    Diverged,
    Precision,
    Ranks,
    Schedule,
    ScheduleConfig,
    TensorData,
    Trainer,
    TrainerConfig,
    apply_settings,
    check_compile,
    choose_device,
    evaluation_mode,
    join,
    load_weights,
    seed_everything,
    synchronize,
    takes_model,
    use_channels_last,
)


@dataclass(frozen=True)
class Parts:
    """What a configuration was built into, before any data is touched."""

    dataset: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    precision: Precision
    config: TrainerConfig
    schedule: Schedule
    augment: AugmentConfig
    tracking: TrackingConfig
    clock: Clock
    ranks: Ranks


def train(job: Job) -> dict[str, Any]:
    """Do one run and return its run.json; its `state` is `"done"` or `"diverged"`.

    Every mistake in the configuration is found before the run's folder is created.

    Raises:
        InputError: Configuration or data are not usable.
        StopRequested: The run was asked to stop; its state on disk is `"interrupted"`.
        Exception: Whatever a user-defined class raised; the state on disk is `"failed"`.
    """
    if job.stored is not None and _is_complete(job.stored, job.config):
        return job.stored
    ranks = join()
    parts = build_parts(job, ranks)
    if not ranks.is_first:
        folder: RunFolder = UnwrittenFolder(job.folder)
    elif job.stored:
        folder = RunFolder(job.folder)
    else:
        folder = RunFolder.create(job.folder, allowed=MAY_LIE_THERE)
    ranks.watch(partial(record_end, job.folder))
    with folder.lock():
        if job.stored is None and ranks.is_first:
            write_local_paths(job.config, folder.path)
        record = first_record(job, parts.model, parts.optimizer, parts.device, parts.precision, ranks.size)
        recording = Recording(folder, record, parts.clock)
        try:
            with parts.clock.part("startup"):
                trainer = _trainer(job, parts, recording)
            with deferred_signals() as stop:
                try:
                    trainer.fit(stop)
                except BudgetError as error:
                    raise ConfigError(f"optimizer.engine.memory_budget: {error}") from error
        except Diverged as error:
            record = recording.close(error)
        except BaseException as error:
            cause = ranks.explained(error)
            if job.stored is not None and recording.trainer is None and isinstance(cause, InputError):
                recording.withdraw(job.stored)  # rejected before it was resumed: the run is as it was
            else:
                recording.close(cause)
            if cause is error:
                raise
            raise cause from error
        else:
            record = recording.close(None)
        ranks.done()
        return record


def build_parts(job: Job, ranks: Ranks = ALONE) -> Parts:
    """Build and check everything that needs no data.

    Args:
        job: What to build.
        ranks: The processes that do the run.

    Raises:
        InputError: A wrong key, value or combination, or missing raw data.
    """
    check_entries(job.config)
    config, tracking = TrainerConfig(**job.config["trainer"]), TrackingConfig(**job.config["tracking"])
    scheduled, augment = ScheduleConfig(**job.config["schedule"]), AugmentConfig(**job.config["augment"])
    device = choose_device(ranks.device_name(config.device))
    if device.type == "cuda" and ranks.size > 1:
        torch.cuda.set_device(device)
    clock = Clock(partial(synchronize, device))
    with clock.part("startup"):
        precision = apply_settings(config)
        seed_everything(job.config["seed"])
        model = build("model", job.config["model"]).to(device, getattr(torch, config.dtype))
        section = job.config["optimizer"]
        if ranks.size > 1:
            model = _for_ranks(model, section, config, device, ranks)
        optimizer = _build_optimizer(section if job.stored is None else _on_this_machine(section), model)
        schedule = _schedule(scheduled, config, section, optimizer, job.stored)
        if config.compile:
            check_compile(optimizer, device)
        dataset = build_dataset(job.config["dataset"])
        augment.check(getattr(dataset, "augmentations", ()), str(job.config["dataset"].get("name")))
        if hasattr(dataset, "check"):
            dataset.check(config.image_size)
        _probe(model, dataset, config, device)
        if job.config["init_from"] is not None and job.stored is None:
            warm_start(model, job.config["init_from"])
    return Parts(
        dataset, model, optimizer, device, precision, config, schedule, augment, tracking, clock, ranks
    )


def _for_ranks(
    model: nn.Module,
    section: Mapping[str, Any],
    config: TrainerConfig,
    device: torch.device,
    ranks: Ranks,
) -> nn.Module:
    """Return the network for several ranks, where batch norm needs the statistics of the whole batch.

    Raises:
        ConfigError: What was chosen is another method there, or impossible.
    """
    if config.compile:
        raise ConfigError(
            f"trainer.compile=true is for one process, not for {ranks.size} ranks: set it to false"
        )
    target = target_class("optimizer", section)
    if takes_model(target) and "process_group" not in inspect.signature(target).parameters:
        raise ConfigError(
            f"optimizer._target_={section['_target_']} is built from the network itself and takes no process_group, so "
            f"that {ranks.size} ranks would each train a network of their own: start it in one process"
        )
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return model
    if device.type != "cuda":
        raise ConfigError(
            f"{type(model).__name__} has batch norm, which on {ranks.size} {device.type} ranks would take the "
            "statistics of each rank's share instead of the batch's (SyncBatchNorm needs CUDA): that is another "
            "method. Use one process, CUDA, or a network without it, such as model=resnet_gn"
        )
    synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return synchronized


def record_end(folder: Path, error: BaseException) -> None:
    """Record how a run ended on behalf of a process that is gone or hangs."""
    state, _ = outcome(error)
    run = RunFolder(folder)
    if run.run_json.is_file() and run.read_run()["state"] == "running":
        run.update_run(state=state, error={"type": type(error).__name__, "message": str(error)})
        run.append_log(f"{state}: {error}")


def warm_start(model: nn.Module, init_from: str) -> None:
    """Load the last weights of another run, its last layer included; the statistics of the targets are new.

    Raises:
        InputError: The folder is not a run's, the run is still running, or its network has other parameters.
    """
    folder = run_folder("init_from", init_from)
    if folder.is_busy():
        raise InputError(
            f"init_from={shown(folder.path)} is still running, so that its last weights are those of no finished run: "
            "wait until it has ended, or stop it"
        )
    load_state(
        model,
        load_weights(folder.checkpoint_dir, say),
        f"init_from={shown(folder.path)} holds a {folder.read_run()['model']['name']} whose weights do not fit",
        "Choose the same model, depth, width and channels",
    )


def _build_optimizer(section: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    wants_model = takes_model(target_class("optimizer", section))
    optimizer = build("optimizer", section, model if wants_model else list(model.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer._target_={section['_target_']} did not make a torch.optim.Optimizer")
    loss = section.get("loss", "squared_error")
    if wants_model and loss != "squared_error":
        raise ConfigError(
            f"optimizer.loss={loss}: the data sets here are regressions; leave it squared_error"
        )
    return optimizer


def _schedule(
    config: ScheduleConfig,
    trainer: TrainerConfig,
    section: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Any] | None,
) -> Schedule:
    """Return the schedule, checked against what else changes or measures the same values."""
    if config.alpha is not None and section.get("adaptive_damping") is not None:
        raise ConfigError(
            f"schedule.alpha={config.alpha}: optimizer.adaptive_damping changes alpha already; set one of them to null"
        )
    if not config.depends_on_length:
        return Schedule(config, optimizer)
    if trainer.theory_every is not None:
        raise ConfigError(
            "trainer.theory_every: the theory's rates are those of a constant lr; use schedule=constant"
        )
    if stored is not None and (epochs := stored["config"]["trainer"]["epochs"]) != trainer.epochs:
        raise ConfigError(
            f"trainer.epochs={trainer.epochs}: the schedule of this run is stretched over its {epochs} epochs; start "
            "a new run for another length"
        )
    return Schedule(config, optimizer)


def _on_this_machine(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer section of a resumed run; kernels that this machine lacks are replaced by its own."""
    engine = section.get("engine")
    if isinstance(engine, Mapping) and engine.get("kernels") in set(kernels.FORMS) - {*kernels.available()}:
        return {**section, "engine": {**engine, "kernels": "auto"}}
    return section


def _trainer(job: Job, parts: Parts, recording: Recording) -> Trainer:
    """Load the data and build the loop, at the last checkpoint if the run is resumed."""
    config = parts.config
    loaded = parts.dataset.load(config.image_size)
    parts.ranks.wait_for_all("data")
    before = ((job.stored or {}).get("dataset") or {}).get("manifest_sha256")
    if before is not None and before != loaded.manifest_sha256:
        raise DataError(
            f"the data set {loaded.name} is not the one this run began with (manifest "
            f"{loaded.manifest_sha256[:12]}, then {before[:12]}): put the old one back, or start a new run"
        )
    data = TensorData.of(loaded, config, parts.device)
    described = dataset_record(loaded)  # after the data was checked
    batch_size = config.batch_size_for(data.size("train"))
    say = recording.reporter.say
    channels_last = config.channels_last and use_channels_last(parts.model, data, say)
    recording.folder.update_run(
        dataset=described,
        scaling=vars(data.scaling),
        precision=asdict(replace(parts.precision, channels_last=channels_last)),
        optimizer=optimizer_record(job, parts.optimizer, batch_size),
    )
    recording.reporter.unit = loaded.unit
    trainer = Trainer(
        parts.model,
        parts.optimizer,
        data,
        config,
        seed=job.config["seed"],
        folder=recording.folder,
        identity=checkpoint_identity(recording.folder.read_run()),
        clock=parts.clock,
        mirror=lambda rows: recording.mirror.log_rows(rows),
        reporter=recording.reporter,
        schedule=parts.schedule,
        augment=Augmentation(parts.augment, seed=job.config["seed"], num_samples=data.size("train"))
        if parts.augment.used
        else None,
        observe=_observer(parts, data, recording),
        ranks=parts.ranks,
    )
    if job.stored is not None:
        _resume(trainer, job.stored, parts.ranks)
    recording.trainer = trainer
    if used := getattr(parts.optimizer, "kernels", None):
        before = filter(None, ((job.stored or {}).get("kernels") or "").split(" then "))
        recording.folder.update_run(kernels=" then ".join(dict.fromkeys([*before, used])))
    # Last: a run that is rejected above has no W&B run to be closed.
    if parts.ranks.is_first:
        recording.start_mirror(parts.tracking)
    recording.reporter.say(_headline(job, parts, described, data))
    return trainer


def _observer(parts: Parts, data: TensorData, recording: Recording) -> Callable[[int], Any] | None:
    """Return what measures the quantities of the theory, which begins at the network's initial weights."""
    config = parts.config
    if config.theory_every is None:
        return None
    from gramgn.theory import Observer

    settings, n = parts.optimizer.param_groups[0], data.size("train")
    is_ggn = "lam" in settings
    x, y = data.batch("train", slice(0, n))
    try:
        observer = Observer(
            parts.model,
            x,
            y,
            num_epochs=config.epochs,
            batch_size=config.batch_size_for(n),
            order=config.order,
            lam=settings["lam"] if is_ggn else None,
            alpha=alpha_to_sum(settings["alpha"], settings["damping_convention"], num_samples=n)
            if is_ggn
            else 0.0,
            # SGD follows the gradient of the mean square, the theory's eta that of half the sum of squares.
            lr=None if is_ggn else 2 * settings["lr"] / n,
        )
    except ValueError as error:
        raise ConfigError(f"trainer.theory_every={config.theory_every}: {error}") from error
    recording.folder.update_run(theory=observer.constants)
    return observer.measure


def _is_complete(stored: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return, and report, whether a finished run has all the epochs that are asked for."""
    done, asked = stored["config"]["trainer"]["epochs"], config["trainer"]["epochs"]
    if stored["state"] != "done" or not isinstance(asked, int) or asked > done:
        return False
    say(f"all {done} epochs of this run are done; give trainer.epochs=<more> to train further")
    return True


def _resume(trainer: Trainer, stored: Mapping[str, Any], ranks: Ranks) -> None:
    if trainer.resume(was_done=stored["state"] == "done"):
        position = trainer.position
        trainer.reporter.say(f"resuming after epoch {position.epoch}, step {position.step}")
        best = trainer.folder.checkpoint_dir / BEST
        if position.best.epoch and not best.is_file():
            trainer.reporter.say(
                f"note: {BEST} (epoch {position.best.epoch}) is gone; there is none until an epoch is better than that"
            )
    else:
        trainer.reporter.say("resuming from the start: the run stopped before its first checkpoint")
    threads = stored["threads"]
    if threads != torch.get_num_threads():
        trainer.reporter.say(
            f"note: {torch.get_num_threads()} threads now, {threads} before; sums may round differently"
        )
    if (before := stored.get("ranks") or 1) != ranks.size:
        trainer.reporter.say(
            f"note: {counted(ranks.size, 'rank')} now, {before} before; sums round differently"
        )


def _headline(job: Job, parts: Parts, described: Mapping[str, Any], data: TensorData) -> str:
    counts = ", ".join(f"{data.size(split)} {split}" for split in ("train", "val", "test"))
    names = " + ".join(job.choices.get(group, "?") for group in ("optimizer", "model"))
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    shape = "x".join(map(str, data.batch("val", slice(0, 1))[0].shape[1:]))
    lines = [
        f"{names} ({parameters:,} parameters) on {described['name']} [{described['kind']}, {shape}]: "
        f"{counts}; {parts.device}, {parts.config.dtype}, {counted(torch.get_num_threads(), 'thread')}"
    ]
    if parts.ranks.size > 1:
        lines[0] += f" on each of {parts.ranks.size} ranks"
    # Only an engine that may use kernels names them among its choices.
    used = getattr(parts.optimizer, "kernels", None)
    if used and "kernels" in getattr(parts.optimizer, "choices", {}):
        lines[0] += f", kernels {used}"
        could_use = (parts.device.type, parts.config.dtype) == ("cpu", "float32")
        if used == kernels.OFF and could_use and (reason := kernels.missing()):
            lines.append(f"note: {reason}")
    return "\n".join([*lines, f"run folder: {shown(job.folder)}"])


def _probe(model: nn.Module, dataset: Any, config: TrainerConfig, device: torch.device) -> None:
    """Try the network on two blank samples, so that a wrong shape is found before the data is prepared.

    Raises:
        ConfigError: The network rejects the samples, or does not return one number per sample.
        JobFailedError: Memory ran out.
    """
    size = dataset.size_for(config.image_size) if hasattr(dataset, "size_for") else config.image_size
    if hasattr(dataset, "sample_shape"):
        shape = tuple(dataset.sample_shape(config.image_size))
    elif getattr(dataset, "channels", None) is not None:
        shape = (dataset.channels, size, size)
    else:  # a user-defined data set need not say what its samples are
        return
    blank = torch.zeros((2, *shape), device=device, dtype=getattr(torch, config.dtype))
    try:
        with evaluation_mode(model), torch.no_grad():
            outputs = model(blank)
    except RecursionError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        if is_out_of_memory(error):
            raise JobFailedError(
                f"memory ran out when the network was tried on two samples of shape {list(shape)}: "
                f"{first_line(error)}. Take a smaller network or smaller images"
            ) from error
        kind = "images" if len(shape) == 3 else "inputs"
        raise ConfigError(
            f"the network does not take {kind} of shape {[2, *shape]}: {first_line(error)}. Check "
            + ("model.in_channels, dataset.channels and trainer.image_size" if len(shape) == 3 else "model")
        ) from error
    got = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if got != [2]:
        raise ConfigError(
            f"the network must return one number per sample, shape [2] for 2 samples; it returned {got}. "
            "Set num_outputs=1, or end its forward with .squeeze(-1)"
        )
