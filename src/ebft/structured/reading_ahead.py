"""Rollouts of later batches, which are generated while earlier ones are trained on (`async_prefetch`)."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ebft.structured.conversations import Row
from ebft.structured.replay import UsesPromptsAgain
from ebft.structured.rollouts.agents import Agents
from ebft.structured.rollouts.prefetch import Prefetcher
from ebft.structured.rollouts.server_rollouts import ServerRollouts
from ebft.structured.rollouts.turns import Rollout


class ReadsAhead(UsesPromptsAgain):
    """A trainer that reads micro-batches ahead of the step, and has their rollouts generated in the background."""

    server: ServerRollouts | None
    _agents: Agents | None

    def prepare_reading(self) -> None:
        """Start with nothing read."""
        self._ahead: deque[list[Row]] = deque()  # micro-batches that were read ahead
        self._epoch_iterator: Any = None
        self._read = 0  # number of micro-batches read; `trained_micro_batches` counts those trained on
        self._prefetcher: Prefetcher[list[Row], list[Rollout]] | None = None

    def _job(self, rows: list[Row]) -> Any:
        """Return the job that samples the rows' conversations from the current weights."""
        raise NotImplementedError

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.async_prefetch:
            self._prefetcher = Prefetcher(self.args.prefetch_depth, self._job)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._stop_rollouts()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the micro-batches of the next optimizer step; with `async_prefetch`, also read later ones ahead."""
        if self._prefetcher is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if epoch_iterator is not self._epoch_iterator:
            self._epoch_iterator = epoch_iterator
            self._ahead.clear()
            self._read = self.trained_micro_batches
        every = self.args.steps_per_generation * self.num_iterations
        while len(self._ahead) < num_batches + self.args.prefetch_depth * every:
            rows = next(epoch_iterator, None)
            if rows is None:
                break
            is_first = self.generation_batch is None and self._read == self.trained_micro_batches
            if self._read % every == 0 or is_first:
                self.inject_failed(rows)
                self._prefetcher.announce(rows)
            self._ahead.append(rows)
            self._read += 1
        batches = [self._ahead.popleft() for _ in range(min(num_batches, len(self._ahead)))]
        return batches, self.items_of(batches, device)

    def _stop_rollouts(self) -> None:
        """Cancel running rollouts and remove the adapters from the server; a later evaluation synchronises again."""
        if self._prefetcher is not None:
            self._prefetcher.close(self._cancel_rollouts)
            self._prefetcher = None
        self._ahead.clear()
        self._epoch_iterator = None
        if self.server is not None:
            self.server.reset()
            self.sync_anew()

    def _cancel_rollouts(self) -> None:
        if self._agents is not None:
            self._agents.cancel()
        self.server.client.cancel()
