"""The verifiers as TRL reward functions, for reinforcement learning with verifiable rewards: configs/rlvr.yaml."""

from typing import Any

import verifiers


def parses(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
    """1 for each completion that makes valid Python of its prompt, else 0."""
    return [verifiers.parses(prompt, [completion], {}) for prompt, completion in zip(prompts, completions)]


def uses_names(
    completions: list[str], prompts: list[str], ground_truth: list[str], **columns: Any
) -> list[float | None]:
    """For each completion the share of its reference's names; None, which TRL leaves out, where that has none."""
    rows = [{"output": reference} for reference in ground_truth]
    return [
        verifiers.uses_names(prompt, [completion], row) for prompt, completion, row in zip(prompts, completions, rows)
    ]
