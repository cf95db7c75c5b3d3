"""Second uses of prompts: groups that replace groups without a training signal, and prompts that are sampled again.

B  completions of a batch, in groups of N per prompt
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ebft.errors import ConfigError

Row = dict[str, Any]
_LEFT = ("prompt_ids", "prompt_mask")  # padded on the left; all others on the right
_IDS = ("prompt_ids", "completion_ids", "reference_ids")


class ReplayBuffer:
    """The last `size` groups with a training signal, which replace groups without one (`replay_buffer_size`).

    A group has a signal if one of its advantages is not 0. Groups are drawn at random, each at most once per batch.
    """

    def __init__(self, size: int, group_size: int, pad_token_id: int, seed: int) -> None:
        self._groups: deque[dict[str, Tensor]] = deque(maxlen=size)
        self._group_size, self._pad_token_id, self._random = group_size, pad_token_id, random.Random(seed)

    def replace(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return the inputs of the loss with groups replaced, and the rows that were; then store the new groups."""
        count, n = len(inputs["advantages"]), self._group_size
        of_rows = {key for key, value in inputs.items() if isinstance(value, Tensor) and value.shape[:1] == (count,)}
        of_rows.update(*self._groups)
        if "tool_mask" in of_rows and "tool_mask" not in inputs:  # every token of the new completions was sampled
            inputs = inputs | {"tool_mask": inputs["completion_mask"]}
        groups = [{key: inputs[key][start : start + n] for key in of_rows} for start in range(0, count, n)]
        has_signal = inputs["advantages"].reshape(len(groups), -1).any(1).tolist()
        silent = [index for index, signal in enumerate(has_signal) if not signal]
        drawn = self._random.sample(list(self._groups), min(len(silent), len(self._groups)))
        self._groups.extend(
            {key: value.clone() for key, value in group.items()} for group, signal in zip(groups, has_signal) if signal
        )
        replaced = silent[: len(drawn)]
        for index, group in zip(replaced, drawn):
            groups[index] = group
        rows = [row for index in replaced for row in range(index * n, index * n + n)]
        if not rows:
            return inputs, rows
        masked = [{"tool_mask": group["completion_mask"], **group} for group in groups]
        return inputs | {key: self._joined(key, [group[key] for group in masked]) for key in of_rows}, rows

    def state(self) -> dict[str, Any]:
        """Return the stored groups and the state of the random numbers, for `restore`."""
        return {"groups": list(self._groups), "random": self._random.getstate()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
        self._groups.clear()
        self._groups.extend(state["groups"])
        self._random.setstate(state["random"])

    def _joined(self, key: str, parts: list[Tensor]) -> Tensor:
        """Concatenate the rows of groups, padded to the longest."""
        if parts[0].dim() == 1:
            return torch.cat(parts)
        length = max(part.shape[1] for part in parts)
        filler = self._pad_token_id if key in _IDS else 0
        sides = [(length - part.shape[1], 0) if key in _LEFT else (0, length - part.shape[1]) for part in parts]
        return torch.cat([torch.nn.functional.pad(part, side, value=filler) for part, side in zip(parts, sides)])


class FailedPrompts:
    """Prompts without a rewarded completion, which are sampled again in later batches (`reroll_start_fraction`).

    A prompt has failed if the total reward of none of its completions is above 0. At most `max_groups` groups of a
    batch are replaced, the oldest failed prompts first.
    """

    def __init__(self, max_groups: int, group_size: int) -> None:
        self._rows: deque[Row] = deque()
        self._injected: deque[list[Row]] = deque()  # of each batch that was read ahead and is not trained on yet
        self._max_groups, self._group_size = max_groups, group_size

    def state(self) -> list[Row]:
        """Return the prompts that are still to be sampled again, for `restore`."""
        return [row for rows in (*self._injected, self._rows) for row in rows]

    def restore(self, rows: list[Row]) -> None:
        """Continue from a result of `state`."""
        self._rows, self._injected = deque(rows), deque()

    def add(self, rows: list[Row], rewards: Iterable[float]) -> None:
        """Store the rows of groups that failed; `rewards` are the total rewards of the completions."""
        rewards, n = list(rewards), self._group_size
        for start in range(0, len(rows), n):
            if not any(reward > 0 for reward in rewards[start : start + n]):
                self._rows.append(rows[start])

    def inject(self, rows: list[Row]) -> int:
        """Replace the last groups of `rows`, in place, by failed prompts, and return their number.

        `begin` says that the oldest batch given to this function is trained on.
        """
        n = self._group_size
        count = min(self._max_groups, len(self._rows), len(rows) // n)
        first = len(rows) - count * n
        failed = [self._rows.popleft() for _ in range(count)]
        self._injected.append(failed)
        rows[first:] = [dict(row) for row in failed for _ in range(n)]  # TRL adds keys to each row
        return count

    def begin(self) -> None:
        self._injected.popleft()


class PromptReuse:
    """The replay buffer and the failed prompts of a trainer, each if its options ask for it.

    Raises ConfigError if the groups of a batch are spread over processes.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, args = trainer, trainer.args
        n, pad = trainer.num_generations, trainer.processing_class.pad_token_id
        per_process = args.per_device_train_batch_size * args.steps_per_generation
        if per_process % n and (args.replay_buffer_size or args.reroll_start_fraction < 1):
            raise ConfigError(
                "replay_buffer_size, reroll_start_fraction: per_device_train_batch_size times steps_per_generation "
                f"({per_process}) must be a multiple of num_generations ({n})."
            )
        self._buffer = ReplayBuffer(args.replay_buffer_size, n, pad, args.seed) if args.replay_buffer_size else None
        self._failed = FailedPrompts(args.reroll_max_groups, n) if args.reroll_start_fraction < 1 else None

    def state(self) -> dict[str, Any]:
        """Return what both have stored, for `restore`."""
        parts = {"replay": self._buffer, "failed": self._failed}
        return {name: part.state() if part is not None else None for name, part in parts.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`; empty if there is none."""
        for part, name in ((self._buffer, "replay"), (self._failed, "failed")):
            if part is not None and state.get(name) is not None:
                part.restore(state[name])

    def inject_failed(self, rows: list[Row]) -> None:
        """Replace some of the rows, in place, by prompts that failed before, in the last part of training."""
        if self._failed is None:
            return
        state, fraction = self._trainer.state, self._trainer.args.reroll_start_fraction
        starts = state.global_step >= fraction * state.max_steps
        count = self._over_processes(self._failed.inject(rows if starts else []))
        self._trainer.log_mean("train", "rerolled_groups", count)

    def begin_batch(self) -> None:
        """Say that the oldest batch of `inject_failed` is trained on now."""
        if self._failed is not None:
            self._failed.begin()

    def note_failed(self, rows: list[Row], rewards: Tensor) -> None:
        """Store prompts that failed, given the total rewards (B,) of the rows."""
        if self._failed is not None:
            self._failed.add(rows, rewards.tolist())

    def with_replayed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the loss in which groups of the replay buffer replace those without a signal."""
        if self._buffer is None:
            return inputs
        trainer = self._trainer
        recomputes, reduce = trainer.args.replay_recompute_logps, trainer.accelerator.reduce
        if not recomputes and "old_per_token_logps" not in inputs:
            inputs = inputs | {"old_per_token_logps": trainer.first_logps(inputs, len(inputs["advantages"]))}
        inputs, replaced = self._buffer.replace(inputs)
        count = self._over_processes(len(replaced) // trainer.num_generations)
        trainer.log_mean("train", "replayed_groups", count)
        if count and recomputes and "old_per_token_logps" in inputs:
            # All processes run the model, which may be sharded; a row that was not replaced has these values already.
            inputs = inputs | self._recomputed(inputs, replaced or [0])
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        inputs["num_items_in_batch"] = reduce(mask.sum(), "sum")
        if "reference_mask" in inputs:
            inputs["reference_tokens"] = reduce(inputs["reference_mask"].sum(), "sum")
        return inputs

    def _over_processes(self, count: int) -> float:
        trainer = self._trainer
        if trainer.accelerator.num_processes == 1:
            return float(count)
        return trainer.accelerator.reduce(torch.tensor(float(count), device=trainer.args.device), "sum").item()

    def _recomputed(self, inputs: dict[str, Any], rows: list[int]) -> dict[str, Tensor]:
        """Return the old log-probabilities and importance ratios, with `rows` scored under the current weights."""
        some = {key: inputs[key][rows] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        logps = inputs["old_per_token_logps"].clone()
        logps[rows] = self._trainer.first_logps(some, len(rows))
        if "importance_sampling_ratio" not in inputs:
            return {"old_per_token_logps": logps}
        mask = some["completion_mask"] * (inputs["tool_mask"][rows] if "tool_mask" in inputs else 1)
        ratio = inputs["importance_sampling_ratio"].clone()
        difference = (logps[rows] - inputs["sampling_per_token_logps"][rows]) * mask
        ratio[rows] = self._trainer.importance_ratio(difference.nan_to_num(0.0))
        return {"old_per_token_logps": logps, "importance_sampling_ratio": ratio}
