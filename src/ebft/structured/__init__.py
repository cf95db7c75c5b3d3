"""Structured EBFT: full completions of prompts, rewarded by feature matching, over generate() or a vLLM server."""

from ebft.structured.config import AsyncEBFTConfig, EBFTConfig, RolloutGRPOConfig
from ebft.structured.grpo import RolloutGRPOTrainer
from ebft.structured.reward import FeatureMatchingReward
from ebft.structured.trainer import AsyncEBFTTrainer, EBFTTrainer

__all__ = [
    "AsyncEBFTConfig",
    "AsyncEBFTTrainer",
    "EBFTConfig",
    "EBFTTrainer",
    "FeatureMatchingReward",
    "RolloutGRPOConfig",
    "RolloutGRPOTrainer",
]
