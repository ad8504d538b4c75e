"""Gram-Gauss-Newton with cross-entropy: ``python examples/classification.py`` (seconds, needs torch alone)."""

import torch
from torch import nn

from gramgn import GramGaussNewton

torch.manual_seed(0)
# Three spirals in the plane, 200 points of each for training and as many for testing.
labels = torch.arange(1200) % 3
radius = torch.rand(1200) * 3
angle = 1.5 * radius + labels * 2 * torch.pi / 3 + 0.1 * torch.randn(1200)
x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
train, test = torch.arange(600), torch.arange(600, 1200)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

# The closure returns logits [b, k] and labels [b]; "mean": alpha is added to the mean over the b samples. Where
# steps overshoot, raise alpha, or let line_search="armijo" shorten them.
optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean", loss="cross_entropy")

for epoch in range(10):
    for batch in train[torch.randperm(len(train))].split(100):
        info = optimizer.step(lambda batch=batch: (model(x[batch]), labels[batch]))
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(dim=1) == labels[test]).float().mean()
    print(f"epoch {epoch + 1}: cross-entropy {info.loss:.3f}, test accuracy {accuracy:.1%}")
