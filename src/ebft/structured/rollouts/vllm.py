"""Rollouts with a vLLM server, from one version of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from ebft.structured.rollouts.adapters import AdapterSync, Version
from ebft.structured.rollouts.backend import Completion, Sampling
from ebft.structured.rollouts.client import ModelNotServed, VLLMClient

_RELOADS = 3  # attempts per call to reload an adapter that a restarted server has lost


@dataclass(frozen=True)
class VLLMBackend:
    """Samples from `version` of the policy's adapter, or from the server's own model if `version` is None."""

    client: VLLMClient
    sampling: Sampling
    base_model: str
    adapters: AdapterSync | None = None
    version: Version | None = None

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        model = self.base_model if self.version is None else self.version.name
        for _ in range(_RELOADS):
            try:
                return self.client.complete(model, prompts, max_tokens, self.sampling)
            except ModelNotServed:
                if self.version is None:
                    raise
                self.adapters.reload(self.version)
        return self.client.complete(model, prompts, max_tokens, self.sampling)
