"""The order of prompts: TRL's RepeatSampler, whose order of an epoch does not depend on the epochs iterated before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from trl.trainer.utils import RepeatSampler


class EpochSampler(RepeatSampler):
    """RepeatSampler with `set_epoch`: epoch e gets the order that RepeatSampler gives in its e-th iteration.

    RepeatSampler draws each order from a generator that continues, so that a resumed run would start again with the
    order of epoch 0.
    """

    epoch = 0

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochSampler:
        """Return a sampler with the settings of `sampler`."""
        return cls(
            sampler.data_source,
            sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, whose order is next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()
        self.epoch += 1
