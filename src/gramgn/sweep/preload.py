"""What jobs import: the process that they are forked from imports this module, once for all of them."""
# ruff: noqa: F401

# torch's optimizers import its compiler, whether or not it is used.
import hydra.utils
import pandas
import torch._dynamo
import torch._inductor
import torch.utils.serialization

import gramgn.data
import gramgn.models
import gramgn.optim
import gramgn.sweep.job
import gramgn.synthetic
import gramgn.training
from gramgn.app import build_parts, outcome, train
