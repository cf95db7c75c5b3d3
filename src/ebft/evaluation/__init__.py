"""Evaluation of models on held-out data, side by side: cross-entropy, feature matching, downstream metrics."""

from ebft.evaluation.evaluate import evaluate
from ebft.evaluation.result import Evaluation, ModelResult

__all__ = ["Evaluation", "ModelResult", "evaluate"]
