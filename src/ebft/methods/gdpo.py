"""GDPO (`rl: gdpo`): GRPO in which each reward is normalised within its group before the rewards are added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebft.methods.grpo import GRPO

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_AGGREGATION = "normalize_then_sum"


class GDPO(GRPO):
    """GRPO with `trl.multi_objective_aggregation: normalize_then_sum`."""

    name = "rl: gdpo"
    tag = "gdpo"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        given = config.trl.multi_objective_aggregation
        if given not in (None, _AGGREGATION):
            yield f"trl.multi_objective_aggregation: {given} contradicts rl: gdpo. Remove it, or set rl: grpo."

    def resolve(self, config: RunConfig) -> None:
        super().resolve(config)
        config.trl.multi_objective_aggregation = _AGGREGATION
