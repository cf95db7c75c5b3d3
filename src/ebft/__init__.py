"""Energy-based fine-tuning of language models (Jelassi et al. 2026, arXiv 2603.12248)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names below, for editors and type checkers
    __version__: str
    from ebft.health.callback import HealthCallback
    from ebft.health.outcome import training_outcome
    from ebft.monitor.run_files import RunFilesCallback
    from ebft.run.config.schema import RunConfig, load_config
    from ebft.run.training import TrainResult, train
    from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
    from ebft.structured import AsyncEBFTConfig, AsyncEBFTTrainer, EBFTConfig, EBFTTrainer, FeatureMatchingReward
    from ebft.tools.evaluation.result import Evaluation
    from ebft.tools.evaluation.run import evaluate

_EXPORTS = {
    "ebft.run.config.schema": ("load_config", "RunConfig"),
    "ebft.run.training": ("train", "TrainResult"),
    "ebft.tools.evaluation.run": ("evaluate",),
    "ebft.tools.evaluation.result": ("Evaluation",),
    "ebft.health.callback": ("HealthCallback",),
    "ebft.health.outcome": ("training_outcome",),
    "ebft.monitor.run_files": ("RunFilesCallback",),
    "ebft.strided": ("StridedEBFTTrainer", "StridedEBFTConfig"),
    "ebft.structured": ("EBFTTrainer", "EBFTConfig", "AsyncEBFTTrainer", "AsyncEBFTConfig", "FeatureMatchingReward"),
}

__all__ = [  # a literal, since type checkers do not evaluate it
    "load_config",
    "RunConfig",
    "train",
    "TrainResult",
    "evaluate",
    "Evaluation",
    "HealthCallback",
    "training_outcome",
    "RunFilesCallback",
    "StridedEBFTTrainer",
    "StridedEBFTConfig",
    "EBFTTrainer",
    "EBFTConfig",
    "AsyncEBFTTrainer",
    "AsyncEBFTConfig",
    "FeatureMatchingReward",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import ebft` is fast."""
    if name == "__version__":
        return import_module("importlib.metadata").version("ebft")
    module = next((module for module, names in _EXPORTS.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'ebft' has no attribute {name!r}. Available: {', '.join(__all__)}.")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
