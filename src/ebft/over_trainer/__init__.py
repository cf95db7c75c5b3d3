"""transformers' Trainer with complete checkpoints, exact continuation, and safe points to stop at.

Like over_transformers.py, the files of this folder use private interfaces of transformers, which
tests/test_contracts.py checks against the installed release.
"""

from ebft.over_trainer.learning_rates import HasLearningRates
from ebft.over_trainer.safe_stops import StopsSafely
from ebft.over_trainer.training_rows import ComparesRows

__all__ = ["OverTrainer"]


class OverTrainer(HasLearningRates, StopsSafely, ComparesRows):
    """Trainer whose checkpoints are complete or absent, and which continues from one exactly, also after a stop.

    Subclasses extend `running_state` and `restore_running_state`, `save_shared` and `load_shared`.
    """
