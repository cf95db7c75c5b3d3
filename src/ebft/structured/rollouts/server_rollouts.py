"""A vLLM server as the source of rollouts: the right one, with weights as fresh as was asked for."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from ebft.structured.rollouts.adapters import AdapterSync
from ebft.structured.rollouts.client import VLLMClient
from ebft.structured.rollouts.sampling import Sampling
from ebft.structured.rollouts.server_check import check_server
from ebft.structured.rollouts.vllm import VLLMBackend


class WeightTransfer(Protocol):
    """What brings all weights of a fully fine-tuned model to the server: TRL's VLLMGeneration."""

    def sync_weights(self) -> None: ...


class ServerRollouts:
    """Connects to the server when made, checks that it fits, and keeps its weights at most `sync_interval` steps old.

    An adapter is published under a new name each time; without one (`transfer`), all weights are sent in place.
    `step` tells the trainer's optimizer step.
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
        step: Callable[[], int],
        failure: Callable[[], str | None],
        transfer: WeightTransfer | None,
    ) -> None:
        self._sampling, self._step, self._transfer = sampling, step, transfer
        self._interval = args.vllm_sync_interval
        self.client = VLLMClient(
            args.vllm_server_host, args.vllm_server_port, args.vllm_server_timeout, failure=failure
        )
        weakref.finalize(self, self.client.close)
        entry = check_server(self.client, model, tokenizer, sampling, base_model, compare_weights=transfer is None)
        self.max_model_len: int | None = entry.get("max_model_len")
        self._base_model = entry["id"]
        self._adapters = AdapterSync(self.client, model, accelerator, args.output_dir) if transfer is None else None
        self._synced_at: int | None = None

    def sync_weights(self, at_once: bool = False) -> None:
        """Bring the weights up to date where due, or `at_once`; TRL calls this before a new step's rollouts."""
        interval = 1 if at_once else self._interval
        if self._synced_at is not None and 0 <= self._step() - self._synced_at < interval:
            return
        if self._adapters is not None:
            atexit.register(self.reset)  # until it is reset: an interpreter that ends leaves nothing on the server
            self._adapters.publish(self._step())
        else:
            self._transfer.sync_weights()
        self._synced_at = self._step()

    @property
    def weights_step(self) -> int:
        """The optimizer step of the weights that are sampled from now."""
        return self._synced_at if self._synced_at is not None else 0

    def backend(self) -> VLLMBackend:
        """Samples from the weights as of the last sync, also after the next one, until `release`."""
        version = self._adapters.current if self._adapters is not None else None
        if version is not None:
            self._adapters.hold(version)
        return VLLMBackend(self.client, self._sampling, self._base_model, self._adapters, version)

    def release(self, backend: VLLMBackend) -> None:
        """Say that nothing more will be sampled from `backend`."""
        if backend.version is not None:
            self._adapters.release(backend.version)

    def reset(self) -> None:
        """Take all adapters back; the next rollouts begin with a sync."""
        atexit.unregister(self.reset)
        if self._adapters is not None:
            self._adapters.close()
        self._synced_at = None

    def close(self) -> None:
        """Reset and disconnect; safe to call twice."""
        self.reset()
        self.client.close()
