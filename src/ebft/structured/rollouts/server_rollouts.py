"""Rollouts from a vLLM server: checks the server and keeps its weights up to date."""

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
    """Sends all weights of a fully fine-tuned model to the server: TRL's VLLMGeneration."""

    def sync_weights(self) -> None: ...


class ServerRollouts:
    """Connects to the server, checks it, and synchronises its weights every `args.vllm_sync_interval` steps.

    An adapter is published under a new name each time. Without an adapter, `transfer` updates all weights in place.
    `step` returns the trainer's optimizer step. Raises RolloutError if the server is unavailable or does not match.
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
