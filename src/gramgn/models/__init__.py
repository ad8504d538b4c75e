"""Residual networks for small images: Fixup, batch-normalised and group-normalised. Needs torch alone.

To add a network: one new underscore module here, one name below, one file in ``conf/model/``.
"""

from gramgn.models._fixup import ResNetFixup
from gramgn.models._normalised import ResNetBN, ResNetGN

__all__ = ["ResNetBN", "ResNetFixup", "ResNetGN"]
