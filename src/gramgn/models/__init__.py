"""Residual networks for small images, torchvision's networks, and the two-layer network of the theory.

Needs torch alone; torchvision is imported only when one of its networks is built. To add a network: one module
here, one name below, one file in `conf/model/`.
"""

from gramgn.models.resnet import ResNetBN, ResNetFixup, ResNetGN
from gramgn.models.torchvision_network import TorchvisionNetwork
from gramgn.models.two_layer import ACTIVATIONS, Activation, TwoLayer, activation_named

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ResNetBN",
    "ResNetFixup",
    "ResNetGN",
    "TorchvisionNetwork",
    "TwoLayer",
    "activation_named",
]
