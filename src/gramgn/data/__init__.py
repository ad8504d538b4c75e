"""Data sets of images or vectors with one real target each: on-disk layouts, preparation, splits, loading.

Importing this package needs numpy and Pillow, not torch. What draws images is resolved on first use
(PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gramgn.data._afad import AFAD
from gramgn.data._archive import unpack_afad
from gramgn.data._dataset import ImageDataset
from gramgn.data._decode import load_image
from gramgn.data._digits import Digits
from gramgn.data._retinamnist import RetinaMNIST
from gramgn.data._rotation import Rotation
from gramgn.data._rsna import RSNA
from gramgn.data._sphere import Sphere
from gramgn.data._types import Decoded, Index, Item, RegressionData, Unused
from gramgn.data._vectors import VectorDataset

if TYPE_CHECKING:
    from gramgn.data._contact_sheet import save_contact_sheet
    from gramgn.data.synthetic import AFADSynthetic, RSNASynthetic

__all__ = [
    "AFAD",
    "RSNA",
    "AFADSynthetic",
    "Decoded",
    "Digits",
    "ImageDataset",
    "Index",
    "Item",
    "RSNASynthetic",
    "RegressionData",
    "RetinaMNIST",
    "Rotation",
    "Sphere",
    "Unused",
    "VectorDataset",
    "load_image",
    "save_contact_sheet",
    "unpack_afad",
]

_HOME_OF = {
    "AFADSynthetic": "gramgn.data.synthetic",
    "RSNASynthetic": "gramgn.data.synthetic",
    "save_contact_sheet": "gramgn.data._contact_sheet",
}


def __getattr__(name: str) -> Any:
    """Import what draws when it is first asked for."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'gramgn.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
