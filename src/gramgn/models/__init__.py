"""Residual networks for small images, and the two-layer network of the theory. Needs torch alone.

To add a network: one new underscore module here, one name below, one file in ``conf/model/``.
"""

from gramgn.models._activations import ACTIVATIONS, Activation, activation_named
from gramgn.models._fixup import ResNetFixup
from gramgn.models._normalised import ResNetBN, ResNetGN
from gramgn.models._two_layer import TwoLayer

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ResNetBN",
    "ResNetFixup",
    "ResNetGN",
    "TwoLayer",
    "activation_named",
]
