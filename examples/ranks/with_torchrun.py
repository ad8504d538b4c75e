"""One step on two processes: ``torchrun --standalone --nproc-per-node=2 examples/ranks/with_torchrun.py``."""

import torch
import torch.distributed as dist
from problem import EPOCHS, loader, network
from torch.utils.data import DataLoader, DistributedSampler

from gramgn import GramGaussNewton

dist.init_process_group("gloo")
torch.manual_seed(0)
model, batches = network(), loader()
sampler = DistributedSampler(batches.dataset, shuffle=False)
batches = DataLoader(batches.dataset, batches.batch_size, sampler=sampler)

# The plain network, no DistributedDataParallel. alpha is relative to the mean over the samples of all ranks.
optimizer = GramGaussNewton(model, lam=1.0, alpha=0.01)

for epoch in range(EPOCHS):
    for x, y in batches:
        info = optimizer.step(lambda x=x, y=y: model(x) - y)  # of this rank's samples
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {info.loss:.12e} of {info.num_samples} samples")
dist.barrier()
dist.destroy_process_group()
