"""Small finished runs for the tests of the tools, and the tools' command lines in this process."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import picture
from house import BLOBS, PLUGIN, House

from gramgn.app import train_command

SMALL_NET = ("model=resnet_gn", "model.width=8", "trainer=debug", "tracking=none", "optimizer=sgd")
Tool = Callable[..., int]


@contextmanager
def in_house(house: House) -> Iterator[pytest.MonkeyPatch]:
    """Make the plug-in importable and nobody's account visible while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        patch.setenv("HOME", str(house.root))
        patch.setenv("HYDRA_FULL_ERROR", "1")
        yield patch


def train(house: House, *overrides: str) -> Path:
    """Train in this process and return the new run's folder."""
    before = set(house.runs())
    with in_house(house) as patch:
        patch.setattr(sys, "argv", sys.argv)
        code = train_command([*BLOBS, *overrides], house.root)
    assert code in (0, 3), f"train.py ended with {code}"
    (folder,) = set(house.runs()) - before
    return folder


def tool(house: House, name: str, *words: str) -> int:
    """Run ``scripts/<name>.py`` in this process and return its exit code."""
    path = house.root / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tool_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with in_house(house) as patch:
        patch.setattr(sys, "argv", [str(path), *words])
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
        code: int = module.main(list(words))
    return code


def copy_of(run: Path, name: str) -> Path:
    """Return a copy of a run beside it, to be damaged."""
    target = run.with_name(name)
    shutil.copytree(run, target)
    return target


def rewrite_checkpoint(run: Path, name: str, **entries: Any) -> None:
    """Change entries of a checkpoint; its links under other names stay as they were."""
    path = run / "checkpoints" / name
    state = torch.load(path, weights_only=True) | entries
    path.unlink()
    torch.save(state, path)


def write_scans(folder: Path, num: int = 6) -> list[Path]:
    """Write pictures of several shapes, formats and pixel formats."""
    folder.mkdir(parents=True)
    sizes = [(20, 24), (40, 17), (300, 290)]
    paths = [folder / f"scan-{number}.{('png', 'jpg')[number % 2]}" for number in range(num)]
    for number, path in enumerate(paths):
        picture(number, sizes[number % 3], ("RGB", "L")[number % 2]).save(path)
    return paths
