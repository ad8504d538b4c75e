"""Lightning Fabric: ``python examples/ranks/with_fabric.py`` (pip install lightning)."""

import torch
from lightning.fabric import Fabric
from problem import EPOCHS, RANKS, loader, network

from gramgn import GramGaussNewton

fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
fabric.launch()
torch.manual_seed(0)

# The loader is set up, so that each rank gets its share. Network and optimizer stay as they are.
batches, model = fabric.setup_dataloaders(loader()), fabric.to_device(network())
optimizer = GramGaussNewton(model, lam=1.0, alpha=0.01)

for epoch in range(EPOCHS):
    for x, y in batches:
        info = optimizer.step(lambda x=x, y=y: model(x) - y)
    fabric.print(f"epoch {epoch + 1}: loss {info.loss:.12e} of {info.num_samples} samples")
