"""Python that loads exported weights and predicts one image, as it stands in the model card."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from typing import Any

from gramgn.app._build import RESERVED
from gramgn.app.tools._trained import Trained
from gramgn.data import ImageDataset, RetinaMNIST, Rotation

WIDTH = 100


def snippet(trained: Trained, weights: str) -> str:
    """Return Python that builds the network, loads ``weights`` and predicts ``image.png``.

    Every number of the preprocessing stands in it, so that it needs nothing of the run.
    """
    dataset = trained.dataset()
    channels = getattr(dataset, "channels", None) or max(1, len(trained.scaling.pixel_mean))
    imports, pixels = _pixels(trained, dataset)
    model_import, model = _network(trained.run["config"]["model"])
    scaling, dtype = trained.scaling, f"torch.{trained.settings.dtype}"
    lines = [
        *sorted({"import torch", *(line for line in (*imports, model_import) if line.startswith("import "))}),
        *sorted(line for line in (*imports, model_import) if line.startswith("from ")),
        "",
        f"model = {model}.to({dtype}).eval()",
        f'model.load_state_dict(torch.load("{weights}", map_location="cpu", weights_only=True))',
        "",
        *pixels,
    ]
    if scaling.pixel_mean:
        lines += [
            f"mean = torch.tensor({scaling.pixel_mean!r}, dtype={dtype}).reshape(1, -1, 1, 1)",
            f"std = torch.tensor({scaling.pixel_std!r}, dtype={dtype}).reshape(1, -1, 1, 1)",
            f"x = (torch.tensor(pixels, dtype={dtype})[None] - mean) / std",
        ]
        if len(scaling.pixel_mean) != channels:
            lines.append(f"x = x.expand(-1, {channels}, -1, -1)")
    else:
        lines.append(f"x = torch.tensor(pixels, dtype={dtype})[None]")
    lines += [
        "with torch.no_grad():",
        f"    prediction = model(x).item() * {scaling.target_std!r} + {scaling.target_mean!r}",
        f'print(f"{{prediction:.2f}} {trained.unit}")',
    ]
    return "\n".join(lines) + "\n"


def _network(section: Mapping[str, Any]) -> tuple[str, str]:
    """Return an import line and the expression that builds the network."""
    target = str(section["_target_"])
    options = {key: value for key, value in section.items() if key not in RESERVED}
    is_simple = not any(isinstance(value, Mapping | list) for value in options.values())
    if (
        not is_simple
        or set(section) & set(RESERVED) != {"_target_"}
        or not all(map(str.isidentifier, options))
    ):
        return (
            "from hydra.utils import instantiate",
            f"instantiate({pprint.pformat(dict(section), width=WIDTH)})",
        )
    module, _, name = target.rpartition(".")
    return (
        f"from {module} import {name}",
        f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})",
    )


def _pixels(trained: Trained, dataset: Any) -> tuple[list[str], list[str]]:
    """Return imports and lines that make ``pixels``, uint8 [C, H, W], from ``image.png``."""
    size, channels = trained.run["dataset"].get("image_size"), len(trained.scaling.pixel_mean)
    if isinstance(dataset, Rotation):
        return ["from gramgn.data import Item, Rotation"], [
            f'decode = Rotation(".", channels={channels}, resize="{dataset.resize}").decoder({size})',
            'pixels = decode(Item("image", "image.png", 0.0)).pixels  # masked to the disk, not turned',
        ]
    own = type(dataset).decoder if isinstance(dataset, ImageDataset) else None
    if own in (ImageDataset.decoder, RetinaMNIST.decoder):
        return ["from gramgn.data import load_image"], [
            f'pixels = load_image("image.png", {size}, resize="{dataset.resize}", channels={channels})'
        ]
    if not channels and hasattr(dataset, "sample_shape"):
        return ["import numpy"], [
            "# One sample as the data set makes it; zeros stand here for its numbers.",
            f"pixels = numpy.zeros({tuple(dataset.sample_shape(size))})",
        ]
    shape = f"({channels}, {size}, {size})" if channels else "..."
    return ["import numpy"], [
        "# One image as your own data set makes it; zeros stand here for its pixels.",
        f"pixels = numpy.zeros({shape}, dtype=numpy.uint8)",
    ]
