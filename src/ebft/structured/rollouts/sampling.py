"""What every rollout backend takes and gives: prompts as token ids, limits per prompt, and how to sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled; `end_ids` end one, `extra` goes to the backend as it is."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    end_ids: frozenset[int] = frozenset()
    regex: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """Sampled ids, the terminating one included, and their log-probabilities where the backend gives them."""

    ids: list[int]
    logps: list[float] | None


class Backend(Protocol):
    """Samples completions of token ids."""

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """One completion per prompt, of 1 to `max_tokens[i]` tokens, each drawn independently."""
        ...
