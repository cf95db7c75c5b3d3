"""TRL's GRPOTrainer with hooks and public names for its private interface.

All use of TRL's private interface is in the files of this folder; tests/test_contracts.py checks it against the
installed release.
"""

from ebft.structured.over_trl.grouped_batches import ROW, by_group
from ebft.structured.over_trl.held_out import CountsRowsOnce
from ebft.structured.over_trl.hooks import HasHooks
from ebft.structured.over_trl.names import NamesPrivates
from ebft.structured.over_trl.resuming import ResumesGeneration

__all__ = ["COMPLETIONS", "LOGPROBS", "ROW", "OverTRL", "by_group"]

COMPLETIONS, LOGPROBS = 3, 4  # indices of the completions and log-probabilities in the result of TRL's `_generate`


class OverTRL(HasHooks, CountsRowsOnce, ResumesGeneration, NamesPrivates):
    """GRPOTrainer with hooks in its steps, which counts held-out rows once, and continues exactly from a checkpoint."""
