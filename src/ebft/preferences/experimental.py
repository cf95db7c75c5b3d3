"""ORPO and SimPO: trainers of `trl.experimental`, whose interface may change in any release of TRL."""

from __future__ import annotations

import warnings

from ebft.preferences.counting import CountsRows
from ebft.preferences.over_trl.without_reference import PreparedBatches

with warnings.catch_warnings():  # of TRL, on import; the documentation says it
    warnings.simplefilter("ignore", UserWarning)
    from trl.experimental import cpo, orpo


class ORPOTrainer(CountsRows, PreparedBatches, orpo.ORPOTrainer):
    """ORPO."""

    scores_prompts = True


class CPOTrainer(CountsRows, PreparedBatches, cpo.CPOTrainer):
    """SimPO, a loss of CPO."""

    scores_prompts = False
