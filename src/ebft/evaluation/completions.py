"""Sampled and greedy full completions of the evaluated models, with the same random seeds for every model."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ebft.data.conversation import Conversation, Renderer, without_end
from ebft.evaluation.task import Task
from ebft.models.causal_lm import unwrap_adapter
from ebft.structured.config import check_own_kwargs, generate_kwargs
from ebft.structured.reward import end_token_ids
from ebft.structured.rollouts.backend import Sampling
from ebft.structured.rollouts.hf import ModelBackend
from ebft.structured.rollouts.turns import Limits, Rollout, roll_out


class Completions:
    """Generates `settings.samples` sampled completions and one greedy completion per prompt with `generate()`."""

    def __init__(self, policy: nn.Module, renderer: Renderer, task: Task) -> None:
        settings, of_run = task.settings, task.config.method.sampling(task.config)
        self._settings, self.tokenizer = settings, renderer.tokenizer
        extra = dict(of_run.extra or {})
        self.end_ids = frozenset(end_token_ids(policy, renderer, extra.pop("stop_token_ids", ())))
        extra = _for_generate(extra, of_run.regex)
        sampling = Sampling(settings.temperature, end_ids=self.end_ids, extra=extra, **(of_run.options or {}))
        pad = self.tokenizer.pad_token_id
        self._sampled = ModelBackend(policy, sampling, pad)
        self._greedy = ModelBackend(policy, replace(sampling, temperature=0.0), pad)
        positions = getattr(unwrap_adapter(policy).config.get_text_config(), "max_position_embeddings", None)
        self._limits = Limits(settings.max_new_tokens, settings.by_reference, positions)

    def sample(self, conversations: list[Conversation], name: str) -> list[list[Rollout]]:
        """Return the samples of each conversation; the random numbers depend on the seed and `name`."""
        n = self._settings.samples
        repeated = [conversation for conversation in conversations for _ in range(n)]
        with _seeded(f"{self._settings.seed}:{name}"):
            rollouts = roll_out(self._sampled, repeated, self._limits, self.end_ids)
        return [rollouts[start : start + n] for start in range(0, len(rollouts), n)]

    def greedy(self, conversations: list[Conversation]) -> list[Rollout]:
        """Return the greedy completion of each conversation."""
        return roll_out(self._greedy, conversations, self._limits, self.end_ids)

    def text(self, ids: list[int]) -> str:
        """Decode a reply, without its end token."""
        return self.tokenizer.decode(without_end(ids, self.end_ids), skip_special_tokens=True)


def _for_generate(kwargs: dict[str, Any], regex: str | None) -> dict[str, Any]:
    """Return the `trl.generation_kwargs` that `generate` supports, with a warning for those that only vLLM supports."""
    check_own_kwargs(kwargs)
    known = generate_kwargs()
    left = [f"generation_kwargs.{key}" for key in kwargs if key not in known]
    left += ["vllm_guided_decoding_regex"] if regex is not None else []
    if left:
        warnings.warn(
            f"trl.{', trl.'.join(left)}: ignored, because `ebft evaluate` samples with generate(), which does not "
            "support it.",
            stacklevel=2,
        )
    return {key: value for key, value in kwargs.items() if key in known}


@contextmanager
def _seeded(key: str) -> Iterator[None]:
    """Seed the global random number generators, which `generate` uses, with `key`; restore their states afterwards."""
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1)
        yield
