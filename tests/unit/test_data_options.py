"""Options of the data sets: what is not known is rejected, with what would be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gramgn.data import AFAD, RSNA, RetinaMNIST, Rotation
from gramgn.errors import ConfigError

CLASSES: list[type[Any]] = [AFAD, RSNA, RetinaMNIST, Rotation]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("channels", 2, "1, 3"),
        ("channels", True, "1, 3"),
        ("resize", "padd", "did you mean 'pad'"),
        ("on_bad_image", "ignore", "error, skip"),
        ("split_seed", -1, "at least 0"),
        ("target_range", [9, 1], "two ascending numbers"),
        ("target_range", 5, "two ascending numbers"),
        ("grey_range", [0, 70000], "whole numbers from 0 to 65535"),
        ("grey_range", [0.5, 9], "whole numbers"),
        ("grey_range", "0,4095", "whole numbers"),
        ("split_seed", 1.5, "integer"),
        ("limit", 0, "at least 1"),
        ("workers", 0, "at least 1"),
        ("name", "../up", "letters"),
        ("root", "", "path"),
        ("root", 5, "path"),
        ("sizee", 1, "did you mean 'resize'"),
    ],
)
def test_bad_options_name_what_is_allowed(cls: type[Any], option: str, value: object, allowed: str) -> None:
    """D07: the channel count, and every other option, is checked at once."""
    with pytest.raises(ConfigError, match=allowed) as error:
        cls(**{"root": "somewhere", option: value})
    assert option in str(error.value)


@pytest.mark.parametrize(
    ("cls", "option", "value", "allowed"),
    [
        (AFAD, "variant", "light", "did you mean 'lite'"),
        (AFAD, "max_age", 0, "at least 1"),
        (RSNA, "test_from", "val", "auto, validation, test, split"),
        (RSNA, "max_unmatched", 2, "from 0.0 to 1.0"),
        (Rotation, "max_angle", 0, "from 0.1 to 180"),
        (Rotation, "max_angle", float("nan"), "from 0.1 to 180"),
        (Rotation, "angle_seed", "a", "integer"),
    ],
)
def test_bad_layout_options(cls: type[Any], option: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        cls("somewhere", **{option: value})


@pytest.mark.parametrize("size", [0, 3, 2049, 64.0, True, "64"])
def test_bad_image_size(size: Any) -> None:
    with pytest.raises(ConfigError, match="image_size"):
        Rotation("somewhere").check(size)


def test_everything_that_decides_the_content_decides_the_folder(tmp_path: Path) -> None:
    """D11: two settings never share a prepared folder; settings that change nothing do."""
    same: list[dict[str, Any]] = [{}, {"limit": 5}, {"workers": 2}, {"on_bad_image": "skip"}]
    other: list[dict[str, Any]] = [
        {"channels": 1},
        {"resize": "pad"},
        {"split_seed": 1},
        {"variant": "full"},
        {"max_age": 30},
        {"root": tmp_path / "b"},
        {"name": "faces"},
    ]

    def folder(options: dict[str, Any], size: int = 32) -> Path:
        return AFAD(**{"root": tmp_path / "a", "prepared_root": tmp_path, **options}).prepared_folder(size)

    assert len({folder(options) for options in same}) == 1
    folders = {folder(options) for options in other} | {folder({}), folder({}, 64)}
    assert len(folders) == len(other) + 2


def test_the_same_raw_folder_by_another_path_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    one, other = (AFAD(tmp_path / name, prepared_root=tmp_path) for name in ("a", "link"))
    assert one.prepared_folder(32) == other.prepared_folder(32)


def test_the_package_is_cheap_to_import() -> None:
    """Neither torch nor pandas, Hydra or the drawing code is loaded for the data sets of real layouts."""
    code = "import sys, gramgn.data; print([m for m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for module in ("'torch'", "'pandas'", "'hydra'", "'openpyxl'", "'gramgn.synthetic'"):
        assert module not in loaded
