"""Rollouts from a vLLM server, whose weights are kept up to date, directly or through agents that sample from it."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ebft.structured.rollouts.adapters import AdapterSync, Version
from ebft.structured.rollouts.client import ModelNotServed, VLLMClient
from ebft.structured.rollouts.server_checks import Difference, SamplingCheck, check_server
from ebft.structured.rollouts.turns import Completion, Rollout, Sampling

_FEW_TOKENS = 256  # tokens that are scored in addition to those of the loss


class ServerRollouts:
    """Connects to the server, checks it, and synchronises its weights every `args.vllm_sync_interval` steps.

    An adapter is published under a new name each time. Without an adapter, `transfer`, TRL's VLLMGeneration, updates
    all weights in place. `step` returns the trainer's optimizer step. Raises RolloutError if the server is unavailable
    or does not match.
    """

    def __init__(
        self,
        args: Any,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Any,
        sampling: Sampling,
        *,
        base_model: str,
        scores_truncated: bool,
        step: Callable[[], int],
        failure: Callable[[], str | None],
        transfer: Any,
    ) -> None:
        self._sampling, self._step, self._transfer = sampling, step, transfer
        self._is_scored = sampling.is_scored(truncated=scores_truncated)
        self._interval = args.vllm_sync_interval
        self.client: VLLMClient = VLLMClient(
            args.vllm_server_host, args.vllm_server_port, args.vllm_server_timeout, failure=failure
        )
        weakref.finalize(self, self.client.close)
        entry, floor = check_server(
            self.client, model, tokenizer, sampling, base_model, compare_weights=transfer is None
        )
        name = f"the vLLM server at {self.client.address}"
        self._check = SamplingCheck(name, floor, args.vllm_logp_diff_warn, args.vllm_logp_diff_stop)
        self._identified: Version | None = None  # the last version whose samples were compared with other versions
        self.max_model_len: int | None = entry.get("max_model_len")
        self._base_model, self._model, self._gather = entry["id"], model, accelerator.gather
        self._adapters = AdapterSync(self.client, model, accelerator, args.output_dir) if transfer is None else None
        self._synced_at: int | None = None

    def sync_weights(self, at_once: bool = False) -> None:
        """Update the server's weights if due, or, with `at_once`, if outdated. TRL calls this before rollouts."""
        interval = 1 if at_once else self._interval
        if self._synced_at is not None and 0 <= self._step() - self._synced_at < interval:
            return
        if self._adapters is not None:
            atexit.register(self.reset)  # remove the adapters from the server if the interpreter exits before reset()
            self._adapters.publish(self._step())
        else:
            self._transfer.sync_weights()
        self._synced_at = self._step()

    @property
    def weights_step(self) -> int:
        """The optimizer step of the weights that are currently used for sampling."""
        return self._synced_at if self._synced_at is not None else 0

    def backend(self) -> VLLMBackend:
        """Return a backend that samples from the weights of the last sync, even after later ones, until `release`."""
        version = self._adapters.current if self._adapters is not None else None
        if version is not None:
            self._adapters.hold(version)
        return VLLMBackend(self.client, self._sampling, self._base_model, self._adapters, version)

    def check_samples(
        self, inputs: dict[str, Tensor], version: Version | None, weights_step: int, score: Callable[[int], Tensor]
    ) -> Difference:
        """Compare the log-probabilities of a batch that was sampled from `version`, with weights of `weights_step`.

        `score(rows)` returns the trainer's log-probabilities of the first rows, (rows, C), under the model's weights at
        that time. A batch from outdated weights is compared on few rows, under a copy of these weights. The first batch
        of each version is also compared with the base model and other versions. Raises RolloutError if the server
        sampled from other weights, on all processes.
        """
        step, server = self._step(), inputs["sampling_per_token_logps"]
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        few = _rows_with(mask, _FEW_TOKENS)
        is_outdated = weights_step != step
        if is_outdated or "old_per_token_logps" not in inputs:
            with self._adapters.weights_of(version) if is_outdated and version else nullcontext():
                own = score(few)
        else:
            own = inputs["old_per_token_logps"]
        difference = lambda logps: Difference.of(logps, server[: len(logps)], mask[: len(logps)], self._gather)
        found = difference(own)
        name = "the transferred weights" if version is None else _name(version)
        if version is not None and version != self._identified:
            self._identified = version
            others = {}
            for other, active in self._other_weights(version).items():
                with active():
                    others[other] = difference(score(few))
            self._check.check_others(difference(own[:few]), name, step, others)
        if self._is_scored and not (is_outdated and version is None):
            self._check.check_limits(found, name, step)
        return found

    def _other_weights(self, version: Version) -> dict[str, Callable[[], AbstractContextManager]]:
        """Return contexts with the weights that the server may have used instead of those of `version`, by name."""
        others = [other for other in self._adapters.kept if other != version]
        named = {_name(other): partial(self._adapters.weights_of, other) for other in others}
        return {"the base model without an adapter": self._model.disable_adapter} | named

    def release(self, backend: VLLMBackend) -> None:
        """Release the weights of `backend`, which must not be used for sampling any more."""
        if backend.version is not None:
            self._adapters.release(backend.version)

    def reset(self) -> None:
        """Remove all adapters from the server; the next rollouts start with a sync."""
        atexit.unregister(self.reset)
        if self._adapters is not None:
            self._adapters.close()
        self._synced_at = None

    def close(self) -> None:
        """Reset and disconnect; can be called repeatedly."""
        self.reset()
        self.client.close()


def _name(version: Version) -> str:
    return f"the adapter of step {version.step} ({version.name})"


def _rows_with(mask: Tensor, tokens: int) -> int:
    """Return the number of the first rows of `mask` (B, C) that contain at least `tokens` tokens, or of all rows."""
    enough = (mask.sum(-1).cumsum(0) >= tokens).nonzero()
    return int(enough[0]) + 1 if len(enough) else len(mask)


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


def run_agents(agents: Agents, rows: list[dict[str, Any]], backend: VLLMBackend, max_tokens: int) -> list[Rollout]:
    """Return the rollouts of the agents' conversations about some rows.

    Calls wait for each other, since the server has a single adapter under the name that agents request.
    """
    version, sampling = backend.version, backend.sampling
    with backend.adapters.served_as(POLICY, version):
        return agents.run(rows, AgentSampling(version.name, sampling.temperature, sampling.top_p, max_tokens))
