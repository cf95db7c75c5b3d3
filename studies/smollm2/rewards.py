"""The verifier as a TRL reward function, for reinforcement learning with verifiable rewards: configs/rlvr.yaml."""

from typing import Any

import verifiers


def substance(completions: list[str], prompts: list[str], ground_truth: list[str], **columns: Any) -> list[float]:
    """`verifiers.substance` of each completion, with its own prompt and reference; 0 for all where it is None."""
    rows = [{"output": reference} for reference in ground_truth]
    return [verifiers.substance(prompt, [text], row) or 0.0 for prompt, text, row in zip(prompts, completions, rows)]
