"""Hugging Face Accelerate: ``torchrun --standalone --nproc-per-node=2 examples/ranks/with_accelerate.py``.

``accelerate launch`` starts it as well (pip install accelerate).
"""

import torch
from accelerate import Accelerator
from problem import EPOCHS, loader, network

from gramgn import GramGaussNewton

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)

# The loader is prepared, so that each rank gets its share. The network is not.
batches, model = accelerator.prepare(loader()), network().to(accelerator.device)
optimizer = GramGaussNewton(model, lam=1.0, alpha=0.01)

for epoch in range(EPOCHS):
    for x, y in batches:
        info = optimizer.step(lambda x=x, y=y: model(x) - y)
    accelerator.print(f"epoch {epoch + 1}: loss {info.loss:.12e} of {info.num_samples} samples")
accelerator.wait_for_everyone()
accelerator.end_training()
