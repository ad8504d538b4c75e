"""The model card that is exported with weights: data, numbers, terms, and how to load them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from gramgn.app._repository import absolute
from gramgn.app.tools._snippet import snippet
from gramgn.app.tools._trained import Trained
from gramgn.errors import InputError
from gramgn.records import Row, RunFolder

NUMBERS = (
    ("train", "train_loss", "train_mae", "running mean over the epoch"),
    ("val", "val_loss", "val_mae", "the checkpoint is chosen on it"),
    ("test", "test_loss", "test_mae", ""),
)
MOST_ANCESTORS = 8


def model_card(trained: Trained, weights: str) -> str:
    """Return the text of MODEL_CARD.md.

    Args:
        trained: The network.
        weights: Name of the weights' file beside the card.
    """
    run, data = trained.run, trained.run["dataset"]
    optimizer, model = run.get("optimizer") or {}, run.get("model") or {}
    is_synthetic = data.get("kind") == "synthetic"
    note = " (SYNTHETIC images)" if data.get("image_size") else " (SYNTHETIC)"
    title = f"{model.get('name')} on {data.get('name')}{note if is_synthetic else ''}"
    parts = [
        f"# {title}",
        f"Predicts one number, in {trained.unit}, from {_sample(trained)}. "
        f"{model.get('num_parameters', 0):,} parameters, trained with "
        f"{optimizer.get('name')} by the reference implementation of Gram-Gauss-Newton (arXiv 1905.11675).",
        "## Data",
        *_data(trained, is_synthetic),
        "## Numbers",
        *_numbers(trained),
        "## Loading",
        f"`{weights}` is a plain `state_dict`; loading it executes nothing. In this folder, with the package installed "
        '(`python -m pip install ".[pipeline]"` in a checkout of its code):',
        f"```python\n{snippet(trained, weights)}```",
        "## Training",
        *_training(trained),
        "## Limits and terms",
        *_terms(trained, is_synthetic),
    ]
    return "\n\n".join(parts) + "\n"


def _sample(trained: Trained) -> str:
    size, dim = trained.run["dataset"].get("image_size"), getattr(trained.dataset(), "dim", None)
    return f"an image of {size} x {size} pixels" if size else f"a vector of {dim or 'some'} numbers"


def _data(trained: Trained, is_synthetic: bool) -> list[str]:
    data = trained.run["dataset"]
    summary = data.get("summary") or {}
    counts = summary.get("counts") or {}
    splits = ", ".join(f"{counts[split]} {split}" for split in ("train", "val", "test") if split in counts)
    resize = f", resize {summary['resize']}" if "resize" in summary else ""
    lines = [
        f"{data.get('name')} ({data.get('kind')}), {splits or 'sizes of the splits not recorded'}{resize}. Target in "
        f"{trained.unit}: mean {trained.scaling.target_mean:.6g}, standard deviation "
        f"{trained.scaling.target_std:.6g} over the training split. Manifest `{data.get('manifest_sha256')}`."
    ]
    if summary.get("limit") is not None:
        lines.append(f"Used are {summary.get('used')} of these images (`dataset.limit`).")
    if is_synthetic:
        lines.append(
            "**All images are synthetic: drawn by a program, not photographs and not radiographs. The numbers below "
            "say nothing about real images.**"
            if data.get("image_size")
            else "**All samples are synthetic: drawn at random. The numbers below say nothing about real data.**"
        )
    return lines


def _numbers(trained: Trained) -> list[str]:
    row = _row(trained)
    if row is None:
        return [f"Checkpoint {trained.place}: nothing was measured with exactly these weights."]
    lines = [
        "| split | loss | mae | |",
        "|---|---|---|---|",
        *(
            f"| {split} | {_cell(row[loss])} | {_cell(row[mae])} | {remark} |"
            for split, loss, mae, remark in NUMBERS
        ),
    ]
    return [
        f"Checkpoint {trained.place}. Loss: mean squared error of standardised targets; mae in {trained.unit}.",
        "\n".join(lines),
    ]


def _row(trained: Trained) -> Row | None:
    rows = [row for row in trained.folder.read_metrics() if row["epoch"] == trained.epoch]
    return rows[-1] if rows and not trained.batch else None


def _cell(value: int | float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _training(trained: Trained) -> list[str]:
    run = trained.run
    git, device = run.get("git") or {}, run.get("device") or {}
    command = " ".join(map(shlex.quote, ["python", "train.py", *map(str, run.get("overrides") or [])]))
    changed = " with uncommitted changes" if git.get("dirty") else ""
    settings = {
        key: value
        for key, value in run["config"].get("optimizer", {}).items()
        if not key.startswith("_") and value is not None and value is not False
    }
    told = ", ".join(f"{key} {value}" for key, value in settings.items())
    versions = run.get("versions") or {}
    return [
        f"    {command}",
        f"Optimizer {(run.get('optimizer') or {}).get('name')}: {told}. Batches of {trained.settings.batch_size}, "
        f"{trained.settings.epochs} epochs, {trained.settings.dtype}, seed {run.get('seed')}.",
        f"Run `{run.get('id')}`, git {git.get('commit')}{changed}, torch {versions.get('torch')}, on "
        f"{device.get('kind')} ({device.get('name')}).",
    ]


def _terms(trained: Trained, is_synthetic: bool) -> list[str]:
    lines = [
        "A research result, for comparing optimizers. Not for diagnosis, and not for decisions about people.",
        "The code is licensed under Apache-2.0. Weights carry what they were trained on, so the terms of the data "
        "hold for them as well:",
    ]
    terms = [_terms_of(trained.run, trained.dataset(), is_synthetic)]
    terms += _ancestors(trained)
    return [*lines, "\n".join(f"- {line}" for line in terms)]


def _ancestors(trained: Trained) -> list[str]:
    """Return the terms that come from the runs whose weights this one started from, newest first."""
    terms: list[str] = []
    before = trained.config.get("init_from")
    while before and len(terms) < MOST_ANCESTORS:
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


def _terms_of(run: Mapping[str, Any], dataset: object, is_synthetic: bool) -> str:
    name = run["dataset"].get("name")
    if is_synthetic:
        return f"{name}: drawn by this project, nothing real is in it; no terms beyond the code's"
    source = getattr(dataset, "source", "")
    return f"{name}: {source}" if source else f"{name}: the terms of its owner"
