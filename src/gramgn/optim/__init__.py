"""The Gram-Gauss-Newton optimizer; it needs torch and, of this package, only `gramgn.damping`.

"GGN" means *Gram*-Gauss-Newton here; elsewhere it often stands for the *generalized* Gauss-Newton matrix. Where to find
what:

- `algorithm`: Algorithm 1 of the paper, and how momentum, weight decay and parameter groups generalise it
- `gram`: the Jacobian J and the Gram matrix G = J J^T, the protocol that every engine fulfils
- `solve`: (lam G + damping I) u = r
- `spring`: SPRING momentum and weight decay inside the solve, one shift
- `ggn`: the optimizer itself; `settings`, `state`, `info`: its hyper-parameters, `state_dict` and `StepInfo`
- `engines`, `stream`, `vmap`, `graph`: how J is formed; `closure`, `outputs`: how the user's closure is called
- `ranks`: one step on several processes
- `kernels`: the compiled kernels of the CPU, and how they are chosen
- `terms`, `rows`: residuals of any kind, and how their J is formed
- `losses`; `acceptance`: Levenberg-Marquardt and Armijo; `guards`: what is rejected; `runtime`: torch and the machine
"""

from gramgn.optim.acceptance import Armijo, Grid, LevenbergMarquardt
from gramgn.optim.closure import Trained
from gramgn.optim.engines import Loop, Rows, Stream, Vmap
from gramgn.optim.ggn import GramGaussNewton
from gramgn.optim.gram import BlockLinearisation, Engine, Linearisation
from gramgn.optim.graph import LoopEngine, RowsEngine
from gramgn.optim.guards import note_device
from gramgn.optim.info import StepInfo, TermInfo
from gramgn.optim.losses import CrossEntropy, Loss, Reading, SquaredError
from gramgn.optim.runtime import float64_home, is_out_of_memory, jacobian_eps
from gramgn.optim.solve import Solution, SolveError, solve_system
from gramgn.optim.stream import BudgetError
from gramgn.optim.terms import OneSample, Term
from gramgn.optim.vmap import VmapEngine

__all__ = [
    "Armijo",
    "BlockLinearisation",
    "BudgetError",
    "CrossEntropy",
    "Engine",
    "GramGaussNewton",
    "Grid",
    "LevenbergMarquardt",
    "Linearisation",
    "Loop",
    "LoopEngine",
    "Loss",
    "OneSample",
    "Reading",
    "Rows",
    "RowsEngine",
    "Solution",
    "SolveError",
    "SquaredError",
    "StepInfo",
    "Stream",
    "Term",
    "TermInfo",
    "Trained",
    "Vmap",
    "VmapEngine",
    "float64_home",
    "is_out_of_memory",
    "jacobian_eps",
    "note_device",
    "solve_system",
]
