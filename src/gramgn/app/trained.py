"""A run's network as it was trained: built from the recorded configuration, with the weights of a checkpoint.

`Trained.inputs` prepares image files as `TensorData` prepares data sets, so that prediction and evaluation give an
image the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramgn.app.build import build, build_dataset
from gramgn.app.paths import shown
from gramgn.app.plan import with_local_paths
from gramgn.errors import ConfigError, InputError, checked_choice, first_line
from gramgn.progress import say
from gramgn.records import Row, RunFolder, checkpoint_identity, path_override
from gramgn.training import (
    BEST,
    LAST,
    Scaling,
    TensorData,
    TrainerConfig,
    apply_settings,
    choose_device,
    read_checkpoint,
    residuals,
)

CHECKPOINTS = {"best": BEST, "last": LAST}
EVALUATED = ("val_loss", "val_mae", "test_loss", "test_mae")
AVERAGE = "average"  # the averaged weights in the last checkpoint
# Entries of run.json that using the network needs.
NEEDED = ("config.dataset._target_", "config.model._target_", "config.trainer", "dataset", "precision")


@dataclass(frozen=True)
class Trained:
    """A trained network, ready to be used.

    Attributes:
        folder: The run's folder, wherever it lies now.
        run: The content of run.json.
        config: The recorded configuration with this machine's paths put back.
        settings: The trainer's settings; device and threads are this machine's.
        model: In evaluation mode, on `device`.
        scaling: Of the targets and pixels, as the checkpoint keeps it.
        device: Where the network is.
        checkpoint: `"best"`, `"last"` or `"average"`.
        epoch: Number of whole epochs that the weights were trained for.
        batch: Number of batches of the next epoch; 0 except for a run interrupted in mid-epoch.
        step: Number of optimizer steps.
    """

    folder: RunFolder
    run: dict[str, Any]
    config: dict[str, Any]
    settings: TrainerConfig
    model: nn.Module
    scaling: Scaling
    device: torch.device
    checkpoint: str
    epoch: int
    batch: int
    step: int

    @property
    def unit(self) -> str:
        """Unit of the targets, e.g. `"months"`."""
        return str(self.run["dataset"].get("unit", ""))

    @property
    def place(self) -> str:
        """Which weights these are, for people."""
        middle = f" and {self.batch} batches" if self.batch else ""
        return f"{self.checkpoint} (epoch {self.epoch}{middle} of {self.settings.epochs}, step {self.step})"

    def row(self) -> Row | None:
        """Return the row of metrics.csv that was measured with these weights, None if there is none."""
        rows = [row for row in self.folder.read_metrics() if row["epoch"] == self.epoch]
        if not rows or self.batch:
            return None
        if self.checkpoint != AVERAGE:
            return rows[-1]
        measured = {name: rows[-1][f"average_{name}"] for name in EVALUATED}
        return rows[-1] | {"train_loss": None, "train_mae": None} | measured

    def dataset(self, root: str | None = None) -> Any:
        """Build the run's data set.

        Args:
            root: Folder of its raw data, where that has moved; None for the recorded one.

        Raises:
            ConfigError: Its class cannot be imported or does not take what is recorded.
        """
        section = self.config["dataset"]
        if root is not None and "root" not in section:
            raise ConfigError(f"dataset.root={root}: {section['_target_']} has no folder of raw data")
        return build_dataset(section if root is None else {**section, "root": root})

    def inputs(self, images: NDArray[Any], channels: int) -> Tensor:
        """Return the network's input `[b, channels, H, W]`, normalised as in training.

        Args:
            images: uint8 `[b, C, H, W]`, or floating features `[b, ...]`, which are left as they are.
            channels: Channels of the network; one stored channel is repeated.
        """
        is_image = images.dtype == np.uint8
        memory_format = _memory_format(self.run) if images.ndim == 4 else torch.contiguous_format
        stored = torch.from_numpy(np.require(images, requirements=["C", "W"]))
        inputs = stored.to(self.device, self._dtype, memory_format=memory_format)
        if is_image:
            mean, std = (
                torch.tensor(levels, dtype=self._dtype, device=self.device).reshape(1, -1, 1, 1)
                for levels in (self.scaling.pixel_mean, self.scaling.pixel_std)
            )
            inputs = (inputs - mean) / std
            if inputs.shape[1] != channels:
                inputs = inputs.expand(-1, channels, -1, -1).contiguous(memory_format=memory_format)
        return inputs

    def predict(self, images: NDArray[Any], channels: int) -> NDArray[np.float64]:
        """Return predictions `[b]` in the data's unit; arguments as for `inputs`.

        Raises:
            InputError: The network does not return one number per image.
        """
        zeros = torch.zeros(len(images), dtype=self._dtype, device=self.device)
        with torch.no_grad():
            outputs = residuals(self.model, self.inputs(images, channels), zeros)
        scaled: NDArray[np.float64] = outputs.double().cpu().numpy()
        return scaled * self.scaling.target_std + self.scaling.target_mean

    def tensors(self, loaded: Any) -> TensorData:
        """Return a data set as the training loop sees it; `loaded` is the data that the run was trained on."""
        data = TensorData.of(loaded, self.settings, self.device)
        if data.is_image:
            data.memory_format = _memory_format(self.run)
        return data

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype


def load_trained(folder: RunFolder, *, checkpoint: str = "best", device: str = "auto") -> Trained:
    """Build a run's network and load its weights; nothing is written.

    Args:
        folder: A run that is done, or was interrupted after its first checkpoint.
        checkpoint: `"best"` (lowest validation loss), `"last"`, or `"average"`: the averaged weights of the last
            checkpoint, of a run with `trainer.average_decay`.
        device: `"auto"` or a torch device.

    Raises:
        InputError: The run has no usable network, its files are damaged or do not belong together, or a class
            of its configuration cannot be imported.
    """
    checked_choice("checkpoint", checkpoint, [*CHECKPOINTS, AVERAGE])
    run = folder.read_run(*NEEDED)
    _check_ended_well(folder, run)
    state = _checkpoint(folder, checkpoint)
    if state["identity"] != checkpoint_identity(run):
        raise InputError(
            f"{folder.checkpoint_dir / CHECKPOINTS.get(checkpoint, LAST)} was not written by this run as its run.json "
            "describes it: the checkpoint is another run's, or run.json was edited. Put the right one back"
        )
    config = with_local_paths(run["config"], folder.path)
    try:
        chosen = choose_device(device)
    except ConfigError as error:  # on a tool's command line the key has no section
        raise ConfigError(str(error).removeprefix("trainer.")) from None
    # The run's threads and device may not exist here.
    settings = TrainerConfig(**{**config["trainer"], "threads": None, "device": str(chosen)})
    apply_settings(settings)
    # Converted before the weights come: a float32 network would round those of a float64 run.
    model: nn.Module = build("model", config["model"]).to(getattr(torch, settings.dtype))
    load_state(
        model,
        _averaged(folder, state) if checkpoint == AVERAGE else state["model"],
        f"the weights of {folder.path} do not fit {config['model']['_target_']} as it is now",
        "Use the version of it that trained the run",
    )
    trained = Trained(
        folder=folder,
        run=run,
        config=config,
        settings=settings,
        model=model.to(memory_format=_memory_format(run)).to(chosen).eval(),
        scaling=Scaling(**state["scaling"]),
        device=chosen,
        checkpoint=checkpoint,
        epoch=state["epoch"],
        batch=state["batch"],
        step=state["step"],
    )
    if run["state"] == "interrupted":
        say(f"note: this run was interrupted; its checkpoint {trained.place} is used")
    return trained


def _memory_format(run: Mapping[str, Any]) -> torch.memory_format:
    """Return the memory format of kernels and batches of images, as in training."""
    return torch.channels_last if run["precision"].get("channels_last", False) else torch.contiguous_format


def _check_ended_well(folder: RunFolder, run: Mapping[str, Any]) -> None:
    told = str((run.get("error") or {}).get("message") or "").splitlines()
    why = f" ({told[0]})" if told else ""
    resume = f"python train.py {path_override('resume', shown(folder.path))}"
    reasons = {
        "running": f"is running or was killed: wait until it has ended, or resume it: {resume}",
        "failed": f"failed{why}: fix that, then resume it ({resume}) or choose a run that is done",
        "diverged": f"diverged{why}, so there is no trained network: choose a run that is done",
    }
    if run["state"] in reasons:
        raise InputError(f"the run {folder.path} {reasons[run['state']]}")


def _checkpoint(folder: RunFolder, checkpoint: str) -> dict[str, Any]:
    path = folder.checkpoint_dir / CHECKPOINTS.get(checkpoint, LAST)
    if not path.is_file():
        there = [name for name, file in CHECKPOINTS.items() if (folder.checkpoint_dir / file).is_file()]
        instead = (
            f"checkpoint={there[0]} is there"
            if there
            else "copy the folder checkpoints/ too if the run was copied, or train it again"
        )
        raise InputError(f"the run {folder.path} has no checkpoint '{checkpoint}' ({path.name}): {instead}")
    try:
        return read_checkpoint(path)
    except Exception as error:  # a damaged pickle can raise anything
        others = ", ".join(f"checkpoint={name}" for name, file in CHECKPOINTS.items() if file != path.name)
        raise InputError(f"{path} is damaged ({first_line(error)}); try {others}") from error


def _averaged(folder: RunFolder, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the averaged weights of a checkpoint, under the network's own names."""
    if "average" not in state:
        raise InputError(
            f"the run {folder.path} kept no averaged weights (trainer.average_decay was null): use checkpoint=best or "
            "checkpoint=last"
        )
    beginning = "module."  # of torch's AveragedModel, which also counts its updates
    return {
        name.removeprefix(beginning): tensor
        for name, tensor in state["average"].items()
        if name.startswith(beginning)
    }


def load_state(model: nn.Module, weights: dict[str, Tensor], what: str, advice: str) -> None:
    """Load weights into a network.

    Raises:
        InputError: They do not fit; `what` and `advice` begin and end the message.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first, *others = [line.strip() for line in str(error).splitlines()[1:]] or [first_line(error)]
        more = f" (and {len(others)} more)" if others else ""
        raise InputError(f"{what}: {first:.200}{more} {advice}") from error
