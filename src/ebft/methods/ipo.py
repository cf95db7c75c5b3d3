"""IPO (`rl: ipo`): TRL's DPOTrainer with the loss of IPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ebft.methods.dpo import DPO, DPOKeys
from ebft.methods.preferences import PreferenceMethod

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_OF_DPO = ("dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing")


class IPO(DPO):
    """The squared distance of the difference of mean log-ratios to 1 / (2 rl_beta)."""

    name = "rl: ipo"
    tag = "ipo"
    keys = DPOKeys

    def summary(self, config: RunConfig) -> str:
        return "identity preference optimization (IPO)"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from PreferenceMethod.conflicts(self, config)
        for key in _OF_DPO:
            if getattr(config, key) is not None:
                yield f"{key} is incompatible with rl: ipo, whose loss is fixed. Remove it, or set rl: dpo."

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {"loss_type": ["ipo"]}
