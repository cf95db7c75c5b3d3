"""The base of all trainers of this package: transformers' Trainer, and the parts that it owns.

Like transformers_internals.py, the files of this folder use private interfaces of transformers, which
tests/test_contracts.py checks against the installed release.
"""

from ebft.trainer.base import KeepsLogs, MeansOverRows, OverTrainer

__all__ = ["KeepsLogs", "MeansOverRows", "OverTrainer"]
