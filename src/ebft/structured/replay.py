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
        has_signal = [bool(group["advantages"].any()) for group in groups]
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
        return inputs | {key: self._joined(key, [_of(group, key) for group in groups]) for key in of_rows}, rows

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
        self._max_groups, self._group_size = max_groups, group_size

    def add(self, rows: list[Row], rewards: Iterable[float]) -> None:
        """Store the rows of groups that failed; `rewards` are the total rewards of the completions."""
        rewards, n = list(rewards), self._group_size
        for start in range(0, len(rows), n):
            if not any(reward > 0 for reward in rewards[start : start + n]):
                self._rows.append(rows[start])

    def inject(self, rows: list[Row]) -> int:
        """Replace the last groups of `rows`, in place, by failed prompts, and return their number."""
        n = self._group_size
        count = min(self._max_groups, len(self._rows), len(rows) // n)
        first = len(rows) - count * n
        rows[first:] = [row for _ in range(count) for row in [self._rows.popleft()] * n]
        return count


def _of(group: dict[str, Tensor], key: str) -> Tensor:
    return group["completion_mask"] if key == "tool_mask" and key not in group else group[key]
