"""Evaluation of models on held-out data, side by side: cross-entropy, feature matching, downstream metrics."""

from ebft.evaluation.result import Evaluation, ModelResult
from ebft.evaluation.run import evaluate

__all__ = ["Evaluation", "ModelResult", "evaluate"]
