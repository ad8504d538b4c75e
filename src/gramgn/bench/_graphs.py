"""Steps replayed from CUDA graphs: no launch from Python is left in them. Needs a CUDA device."""

from __future__ import annotations

import torch

from gramgn.bench._prepared import MOMENTUM, SGD_LR, Prepared
from gramgn.bench._problem import ALPHA, LAM, Problem
from gramgn.optim import GramGaussNewton

WARM_UP = 3


def captured_sgd(problem: Problem, lr: float, variant: str) -> Prepared:
    """SGD with momentum, its whole step in one graph: forward, backward and update, channels last."""
    model, x = problem.copied(channels_last=problem.shape.pixels is not None)
    y = problem.y
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_LR, momentum=MOMENTUM)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(x) - y).square().mean().backward()
        optimizer.step()

    # Capture needs the libraries' workspaces and the momentum buffers to be there, made on another stream.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Prepared(graph.replay, model)


def captured_ours(problem: Problem, lr: float, variant: str) -> Prepared:
    """Our step from captured graphs: forward to Gram in one, update in the other, the solve between them."""
    model, x = problem.copied(channels_last=problem.shape.pixels is not None)
    optimizer = GramGaussNewton(model, lr=lr, lam=LAM, alpha=ALPHA, damping_convention="mean")
    step = optimizer.capture(lambda x, y: model(x) - y, x, problem.y)
    return Prepared(lambda: step(x, problem.y), model)
