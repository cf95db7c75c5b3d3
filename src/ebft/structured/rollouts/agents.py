"""Rollouts of agents: programs outside of training that hold whole conversations and sample from the vLLM server.

An agent requests a model by a fixed name, `POLICY`, under which the server has the adapter that the agent is to use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from ebft.structured.rollouts.turns import Rollout
from ebft.structured.rollouts.vllm import VLLMBackend

POLICY = "ebft-policy"  # the name of the policy's current adapter on the server


@dataclass(frozen=True)
class AgentSampling:
    """How an agent samples: `version` is the name of the adapter's version, which `POLICY` stands for meanwhile.

    `max_tokens` is the maximum number of tokens of each reply.
    """

    version: str
    temperature: float
    top_p: float
    max_tokens: int


class Agents(Protocol):
    """Runs conversations with agents."""

    def run(self, rows: list[dict[str, Any]], sampling: AgentSampling) -> list[Rollout]:
        """Return one rollout with its reward per row; blocks until all are complete. Raises RolloutError."""
        ...

    def cancel(self) -> None:
        """Cancel running conversations; the threads that wait for them raise CancelledError."""
        ...


@dataclass
class AgentJob:
    """The inputs for the conversations of some rows, fixed when the job is created; `run` may be called on any thread.

    Jobs run one at a time, since the server has a single adapter under the name that agents request.
    """

    agents: Agents
    rows: list[dict[str, Any]]
    backend: VLLMBackend
    max_tokens: int
    weights_step: int  # the optimizer step of the weights used for sampling
    seconds: float = 0.0  # duration of `run`

    def run(self) -> list[Rollout]:
        started = time.perf_counter()
        try:
            return self._run()
        finally:
            self.seconds = time.perf_counter() - started

    def _run(self) -> list[Rollout]:
        version, sampling = self.backend.version, self.backend.sampling
        with self.backend.adapters.served_as(POLICY, version):
            return self.agents.run(
                self.rows, AgentSampling(version.name, sampling.temperature, sampling.top_p, self.max_tokens)
            )
