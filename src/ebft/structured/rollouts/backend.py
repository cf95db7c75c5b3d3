"""Interface of rollout backends: prompts as token ids, token limits per prompt, and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ebft.prefix.sampling import Truncation

# Other parameters of a backend that do not change the distribution of a token.
_HARMLESS = {"stop", "include_stop_str_in_output", "priority"}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `end_ids` are tokens that end a completion; `extra` is passed to the backend unchanged."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    end_ids: frozenset[int] = frozenset()
    regex: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def is_scored(self, truncated: bool) -> bool:
        """Whether the trainer scores tokens under the distribution that they are sampled from.

        `truncated`: whether it applies top-k, top-p and min-p.
        """
        if not truncated and Truncation.of(self.top_k, self.top_p, self.min_p) is not None:
            return False
        return self.repetition_penalty == 1 and self.regex is None and self.extra.keys() <= _HARMLESS


@dataclass(frozen=True)
class Completion:
    """Sampled ids, including the terminating token, and their log-probabilities if the backend provides them."""

    ids: list[int]
    logps: list[float] | None


class Backend(Protocol):
    """Samples completions of token ids."""

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """Return one completion per prompt, of 1 to `max_tokens[i]` tokens, each sampled independently."""
        ...
