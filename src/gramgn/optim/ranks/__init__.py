"""One step on R processes, called ranks: each has some samples of the batch, and all take the same step.

- `group`: the collectives that a step needs, and errors that are raised on all ranks
- `exchange`: G from the rows of all ranks, each of which gets some columns of J
- `together`: the step; rank 0 solves and decides, the others do what it orders

Rank r has b_r of the b samples and n_r of the n rows. All ranks call the same collectives in the same order, whatever
happens on one of them.
"""

from gramgn.optim.ranks.exchange import Exchange
from gramgn.optim.ranks.group import Ranks, find_ranks
from gramgn.optim.ranks.together import JointLinearisation, start_together, step_together

__all__ = ["Exchange", "JointLinearisation", "Ranks", "find_ranks", "start_together", "step_together"]
