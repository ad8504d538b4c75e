"""What the examples on several processes train: a small network on 512 points, 64 per step, in float64."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

RANKS, EPOCHS, BATCH = 2, 3, 64


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of the share of one rank, before a launcher divides the samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(512, 2, generator=generator, dtype=torch.float64) * 4 - 2
    y = torch.sin(x[:, :1]) * torch.cos(2 * x[:, 1:])
    return DataLoader(TensorDataset(x, y), batch_size=BATCH // RANKS)


def network() -> nn.Module:
    """Return the network; all ranks take the parameters of rank 0."""
    layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return layers.double()
