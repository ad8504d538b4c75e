"""Ray Train: ``python examples/ranks/with_ray.py`` (pip install 'ray[train]')."""

import sys
from pathlib import Path

import ray
import torch
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_data_loader

sys.path.append(str(Path(__file__).parent))
PATHS = [path for path in sys.path if path]


def train() -> None:
    """Train on one worker; Ray has initialised torch.distributed."""
    sys.path[:0] = PATHS
    from problem import EPOCHS, loader, network

    from gramgn import GramGaussNewton

    torch.manual_seed(0)
    # The loader is prepared, so that each rank gets its share. The network is not: no prepare_model.
    batches, model = prepare_data_loader(loader()), network()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.01)
    for epoch in range(EPOCHS):
        for x, y in batches:
            info = optimizer.step(lambda x=x, y=y: model(x) - y)
        if get_context().get_world_rank() == 0:
            print(f"epoch {epoch + 1}: loss {info.loss:.12e} of {info.num_samples} samples")


ray.init(log_to_driver=True, include_dashboard=False)
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
