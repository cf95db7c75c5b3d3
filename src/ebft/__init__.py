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
    "load_config": "ebft.run.config.schema",
    "RunConfig": "ebft.run.config.schema",
    "train": "ebft.run.training",
    "TrainResult": "ebft.run.training",
    "evaluate": "ebft.tools.evaluation.run",
    "Evaluation": "ebft.tools.evaluation.result",
    "HealthCallback": "ebft.health.callback",
    "training_outcome": "ebft.health.outcome",
    "RunFilesCallback": "ebft.monitor.run_files",
    "StridedEBFTTrainer": "ebft.strided",
    "StridedEBFTConfig": "ebft.strided",
    "EBFTTrainer": "ebft.structured",
    "EBFTConfig": "ebft.structured",
    "AsyncEBFTTrainer": "ebft.structured",
    "AsyncEBFTConfig": "ebft.structured",
    "FeatureMatchingReward": "ebft.structured",
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
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ebft' has no attribute {name!r}. Available: {', '.join(_EXPORTS)}.")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
