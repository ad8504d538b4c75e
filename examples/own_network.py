"""Gram-Gauss-Newton on your own network: ``python examples/own_network.py`` (seconds, needs torch alone)."""

import torch
from torch import nn

from gramgn import GramGaussNewton

torch.manual_seed(0)
x = torch.rand(512, 2) * 4 - 2
y = torch.sin(x[:, :1]) * torch.cos(2 * x[:, 1:])
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

# "mean": alpha is added to the mean of the batch's Gram matrix, J J^T / b, so it goes with the mean square loss
# and does not depend on the batch size. "sum" is the formula as the paper prints it: alpha_sum = alpha b.
optimizer = GramGaussNewton(model, lam=1.0, alpha=0.01, damping_convention="mean")

for epoch in range(10):
    total = 0.0
    for batch in torch.randperm(len(x)).split(64):
        # The closure calls the model once and returns the residuals f - y, not a loss.
        info = optimizer.step(lambda batch=batch: model(x[batch]) - y[batch])
        total += info.loss * info.num_samples
    print(f"epoch {epoch + 1}: mean squared error {total / len(x):.2e}, step norm {info.step_norm:.2e}")
