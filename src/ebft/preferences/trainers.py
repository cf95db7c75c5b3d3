"""DPO, IPO and KTO: TRL's trainers with the budget, checks and checkpoints of all methods."""

from __future__ import annotations

import trl

from ebft.preferences.counting import CountsRows
from ebft.preferences.over_trl.with_reference import PreparedPairs, PreparedRows


class DPOTrainer(CountsRows, PreparedPairs, trl.DPOTrainer):
    """DPO and IPO."""


class KTOTrainer(CountsRows, PreparedRows, trl.KTOTrainer):
    """KTO."""
