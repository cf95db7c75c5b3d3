"""Structured EBFT: full completions of prompts, sampled with generate() or vLLM and rewarded by feature matching."""

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
