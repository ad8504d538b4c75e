"""The Gram-Gauss-Newton optimizer, usable alone: it needs torch and nothing else of this package but `damping`.

"GGN" means *Gram*-Gauss-Newton here; elsewhere it often stands for the *generalized* Gauss-Newton matrix. To
add a way of forming the Jacobian: one new module that fulfils ``gram.Engine``, one name in
``engines.py``.
"""

from gramgn.optim._adaptive import LevenbergMarquardt
from gramgn.optim._gram_gauss_newton import GramGaussNewton
from gramgn.optim._info import SolveError, StepInfo
from gramgn.optim._line_search import Armijo
from gramgn.optim.closure import Trained
from gramgn.optim.engines import Loop, LoopEngine, Stream, Vmap, make_engine
from gramgn.optim.gram import BlockLinearisation, Engine, Linearisation
from gramgn.optim.guards import note_device
from gramgn.optim.losses import CrossEntropy, Loss, Reading, SquaredError
from gramgn.optim.runtime import float64_home, is_out_of_memory, jacobian_eps
from gramgn.optim.vmap import VmapEngine

__all__ = [
    "Armijo",
    "BlockLinearisation",
    "CrossEntropy",
    "Engine",
    "GramGaussNewton",
    "LevenbergMarquardt",
    "Linearisation",
    "Loop",
    "LoopEngine",
    "Loss",
    "Reading",
    "SolveError",
    "SquaredError",
    "StepInfo",
    "Stream",
    "Trained",
    "Vmap",
    "VmapEngine",
    "float64_home",
    "is_out_of_memory",
    "jacobian_eps",
    "make_engine",
    "note_device",
]
