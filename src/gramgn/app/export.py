"""Export of a network: weights alone and a model card, for somebody who has nothing else of the run."""

from __future__ import annotations

import pprint
import secrets
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gramgn.app.config import OBJECT_SECTIONS
from gramgn.app.paths import absolute, repository
from gramgn.app.trained import Trained
from gramgn.data import ImageDataset, Rotation
from gramgn.errors import InputError, first_line
from gramgn.records import RunFolder, override_key

WEIGHTS, CARD = "weights.pt", "MODEL_CARD.md"
SPLITS = ("train", "val", "test")
OWN = "gramgn."  # beginning of the dotted names of this package's classes


def export_run(trained: Trained, out: Path) -> list[Path]:
    """Write a network's weights and its model card into a new folder, both or none.

    Args:
        trained: The network.
        out: The folder, missing or empty.

    Returns:
        The files: a plain `state_dict` that loads with `weights_only=True`, and the card.

    Raises:
        InputError: The folder holds something, or cannot be made.
    """
    taken = InputError(
        f"out={out} is there already and is left as it is: an export never overwrites. Choose a new folder"
    )
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise taken
    out = out.resolve()
    card = model_card(trained)
    weights = {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in trained.model.state_dict().items()
    }
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        torch.save(weights, partial / WEIGHTS)
        (partial / CARD).write_text(card, encoding="utf-8")
        partial.rename(out)  # only an empty folder gives way
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        if out.exists() and any(out.iterdir()):
            raise taken from error
        full = " (is the disk full?)" if isinstance(error, RuntimeError) else ""
        raise InputError(
            f"cannot write {out}: {first_line(error)}{full}. Nothing was written; choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / WEIGHTS, out / CARD]


def model_card(trained: Trained) -> str:
    """Return the text of MODEL_CARD.md: data, numbers, code that loads the weights, training, limits and terms."""
    run, data, unit = trained.run, trained.run["dataset"], trained.unit
    is_synthetic = data.get("kind") == "synthetic"
    noun = "images" if data.get("image_size") else "samples"
    size, dim = data.get("image_size"), getattr(trained.dataset(), "dim", None)
    sample = f"an image of {size} x {size} pixels" if size else f"a vector of {dim or 'some'} numbers"
    model, git, device = run.get("model") or {}, run.get("git") or {}, run.get("device") or {}
    note = f" (SYNTHETIC {noun})" if is_synthetic else ""
    settings = {
        key: value
        for key, value in run["config"]["optimizer"].items()
        if not key.startswith("_") and value is not None and value is not False
    }
    parts = [
        f"# {model.get('name')} on {data.get('name')}{note}",
        f"Predicts one number, in {unit}, from {sample}. {model.get('num_parameters', 0):,} parameters, trained with "
        f"{run['optimizer'].get('name')} by an independent implementation of Gram-Gauss-Newton (arXiv 1905.11675).",
        "## Data",
        _data(trained),
        f"**All {noun} are synthetic, drawn by a program. The numbers below say nothing about real {noun}.**"
        if is_synthetic
        else "",
        "## Numbers",
        _numbers(trained),
        "## Loading",
        f"`{WEIGHTS}` is a plain `state_dict`; loading it executes nothing. In this folder, with the package installed "
        '(`python -m pip install ".[pipeline]"` in a checkout of its code):',
        f"```python\n{snippet(trained)}```",
        "## Training",
        f"    {_command(trained)}",
        "With the same `--config-dir` and `PYTHONPATH` as in training." if _is_user_defined(run) else "",
        f"Optimizer {run['optimizer'].get('name')}: {', '.join(f'{key} {value}' for key, value in settings.items())}. "
        f"Batches of {trained.settings.batch_size}, {trained.settings.epochs} epochs, {trained.settings.dtype}, seed "
        f"{run.get('seed')}.",
        f"Run `{run.get('id')}`, git {git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}, "
        f"torch {(run.get('versions') or {}).get('torch')}, on {device.get('kind')} ({device.get('name')}).",
        "## Limits and terms",
        "A research result, for comparing optimizers. Not for diagnosis, and not for decisions about people.",
        "The code is licensed under Apache-2.0. The terms of the data hold for the weights as well:",
        "\n".join(f"- {line}" for line in (_terms(trained, is_synthetic), *_ancestors(trained))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def snippet(trained: Trained) -> str:
    """Return Python that builds the network, loads the weights and predicts `image.png`.

    It holds every number of the preprocessing, so that it needs nothing of the run.
    """
    dataset, scaling = trained.dataset(), trained.scaling
    channels = getattr(dataset, "channels", None) or max(1, len(scaling.pixel_mean))
    network = pprint.pformat(dict(trained.run["config"]["model"]), width=100, sort_dicts=False)
    dtype = f"torch.{trained.settings.dtype}"
    imports, pixels = _pixels(trained, dataset)
    lines = [
        "import torch",
        "from hydra.utils import instantiate",
        imports,
        "",
        f"model = instantiate({network}).to({dtype}).eval()",
        f'model.load_state_dict(torch.load("{WEIGHTS}", map_location="cpu", weights_only=True))',
        "",
        *pixels,
        f"x = torch.tensor(pixels, dtype={dtype})[None]",
    ]
    if scaling.pixel_mean:
        lines += [
            f"mean = torch.tensor({scaling.pixel_mean!r}, dtype={dtype}).reshape(1, -1, 1, 1)",
            f"std = torch.tensor({scaling.pixel_std!r}, dtype={dtype}).reshape(1, -1, 1, 1)",
            f"x = ((x - mean) / std).expand(-1, {channels}, -1, -1)",
        ]
    lines += [
        "with torch.no_grad():",
        f"    prediction = model(x).item() * {scaling.target_std!r} + {scaling.target_mean!r}",
        f'print(f"{{prediction:.2f}} {trained.unit}")',
    ]
    return "\n".join(lines) + "\n"


def _pixels(trained: Trained, dataset: Any) -> tuple[str, list[str]]:
    """Return an import and the lines that make `pixels`, uint8 [C, H, W], from `image.png`."""
    size, channels = trained.run["dataset"].get("image_size"), len(trained.scaling.pixel_mean)
    grey_range = getattr(dataset, "grey_range", None)
    grey = "" if grey_range is None else f", grey_range={grey_range}"
    if isinstance(dataset, Rotation):
        return "from gramgn.data import Item, Rotation", [
            f'decode = Rotation(".", channels={channels}, resize="{dataset.resize}"{grey}).decoder({size})',
            'pixels = decode(Item("image", "image.png", 0.0)).pixels  # masked to the disk, not turned',
        ]
    if isinstance(dataset, ImageDataset) and type(dataset).decoder is ImageDataset.decoder:
        return "from gramgn.data import load_image", [
            f'pixels = load_image("image.png", {size}, resize="{dataset.resize}", channels={channels}{grey})'
        ]
    shape = (channels, size, size) if channels else tuple(dataset.sample_shape(size))
    return "import numpy", [
        "# One sample as the data set makes it; zeros take its place here.",
        f"pixels = numpy.zeros({shape})",
    ]


def _command(trained: Trained) -> str:
    """Return the command line of the training; that of a resumed run with its final number of epochs."""
    words = [str(word) for word in trained.run.get("overrides") or []]
    if trained.run.get("resume_count"):
        words = [word for word in words if override_key(word) != "trainer.epochs"]
        words.append(f"trainer.epochs={trained.settings.epochs}")
    return shlex.join(["python", "train.py", *words])


def _is_user_defined(run: Mapping[str, Any]) -> bool:
    """Return whether data set, network or optimizer came from outside the repository."""
    choices = run.get("choices") or {}
    return any(
        not str(run["config"][group].get("_target_")).startswith((OWN, "torch."))
        or not (repository() / "conf" / group / f"{choices.get(group)}.yaml").is_file()
        for group in OBJECT_SECTIONS
    )


def _data(trained: Trained) -> str:
    data, scaling = trained.run["dataset"], trained.scaling
    summary = data.get("summary") or {}
    counts = summary.get("counts") or {}
    splits = ", ".join(f"{counts[split]} {split}" for split in SPLITS if split in counts)
    resize = f", resize {summary['resize']}" if "resize" in summary else ""
    limit = summary.get("limit")
    used = f" Used are {summary.get('used')} of these images (`dataset.limit`)." if limit is not None else ""
    return (
        f"{data.get('name')} ({data.get('kind')}), {splits or 'sizes of the splits not recorded'}{resize}. Target in "
        f"{trained.unit}: mean {scaling.target_mean:.6g}, standard deviation {scaling.target_std:.6g} over the "
        f"training split. Manifest `{data.get('manifest_sha256')}`.{used}"
    )


def _numbers(trained: Trained) -> str:
    row = trained.row()
    if row is None:
        return f"Checkpoint {trained.place}: nothing was measured with exactly these weights."
    remarks = {"train": "running mean over the epoch", "val": "the checkpoint is chosen on it", "test": ""}
    lines = [
        f"Checkpoint {trained.place}. Loss: mean squared error of standardised targets; mae in {trained.unit}.",
        "",
        "| split | loss | mae | |",
        "|---|---|---|---|",
    ]
    for split, remark in remarks.items():
        loss, mae = (
            "" if value is None else f"{value:.5g}" for value in (row[f"{split}_loss"], row[f"{split}_mae"])
        )
        lines.append(f"| {split} | {loss} | {mae} | {remark} |")
    return "\n".join(lines)


def _terms(trained: Trained, is_synthetic: bool) -> str:
    name, target = trained.run["dataset"].get("name"), str(trained.run["config"]["dataset"]["_target_"])
    if is_synthetic and target.startswith(OWN):
        return f"{name}: drawn by this project, nothing real is in it; no terms beyond the code's"
    source = getattr(trained.dataset(), "source", "")
    return f"{name}: {source or 'user-defined data set; its terms are those of its owner'}"


def _ancestors(trained: Trained) -> list[str]:
    """Return the terms that come from the runs whose weights this one started from, newest first."""
    terms: list[str] = []
    before = trained.config.get("init_from")
    while before:
        try:
            run = RunFolder(absolute(before)).read_run()
        except InputError:
            return [
                *terms,
                "started from weights of a run whose record is not here; its data's terms hold too",
            ]
        data = run.get("dataset") or {}
        terms.append(
            f"started from weights trained on {data.get('name')} ({data.get('kind')}); its terms hold too"
        )
        before = run["config"].get("init_from")
    return terms
