"""Data sets of images or vectors with one real target per sample: on-disk layouts, preparation, splits, loading.

Importing this package needs numpy and Pillow, neither torch nor pandas. Synthetic images are drawn by
`gramgn.synthetic`.
"""

from gramgn.data.afad import AFAD
from gramgn.data.archive import unpack_afad
from gramgn.data.contact_sheet import contact_sheet, save_contact_sheet
from gramgn.data.dataset import ImageDataset
from gramgn.data.decode import IMAGE_SUFFIXES, Decode, Decoder, array_path, file_of, image_arrays, load_image
from gramgn.data.digits import Digits
from gramgn.data.prepare import decode_all
from gramgn.data.retinamnist import RetinaMNIST
from gramgn.data.rotation import Rotation
from gramgn.data.rsna import RSNA
from gramgn.data.scan import SYNTHETIC_MARKER, some, walk
from gramgn.data.sphere import Sphere
from gramgn.data.split import split_samples
from gramgn.data.types import Decoded, Index, Item, RegressionData, Unused
from gramgn.data.vectors import VectorDataset

__all__ = [
    "AFAD",
    "IMAGE_SUFFIXES",
    "RSNA",
    "SYNTHETIC_MARKER",
    "Decode",
    "Decoded",
    "Decoder",
    "Digits",
    "ImageDataset",
    "Index",
    "Item",
    "RegressionData",
    "RetinaMNIST",
    "Rotation",
    "Sphere",
    "Unused",
    "VectorDataset",
    "array_path",
    "contact_sheet",
    "decode_all",
    "file_of",
    "image_arrays",
    "load_image",
    "save_contact_sheet",
    "some",
    "split_samples",
    "unpack_afad",
    "walk",
]
