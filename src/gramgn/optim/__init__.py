"""The Gram-Gauss-Newton optimizer, usable alone: it needs torch and nothing else of this package.

"GGN" means *Gram*-Gauss-Newton here; elsewhere it often stands for the *generalized* Gauss-Newton matrix. To
add a way of forming the Jacobian: one new module that fulfils ``_engine.Engine``, one name in
``_engines.py``.
"""

from gramgn.optim._adaptive import LevenbergMarquardt
from gramgn.optim._gram_gauss_newton import GramGaussNewton
from gramgn.optim._info import SolveError, StepInfo
from gramgn.optim._line_search import Armijo

__all__ = ["Armijo", "GramGaussNewton", "LevenbergMarquardt", "SolveError", "StepInfo"]
