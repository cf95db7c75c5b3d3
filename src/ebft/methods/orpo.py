"""ORPO (`rl: orpo`): the cross-entropy on chosen texts and an odds-ratio loss, with the trainer of trl.experimental."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ebft.methods.preferences import BetaKeys, PreferenceMethod

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


class ORPOKeys(BetaKeys):
    """Keys of `rl: orpo`."""

    orpo_alpha: float | None = Field(
        None, gt=0, description="orpo: weight of the odds-ratio loss; another name of rl_beta with this method."
    )


class ORPO(PreferenceMethod):
    """ORPOTrainer of trl.experimental."""

    name = "rl: orpo"
    tag = "orpo"
    keys = ORPOKeys
    has_reference = False

    def summary(self, config: RunConfig) -> str:
        return "odds ratio preference optimization (ORPO)"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.orpo_alpha is not None and config.rl_beta not in (None, config.orpo_alpha):
            yield "orpo_alpha and rl_beta are two names of the same weight with rl: orpo. Keep one of them."

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        found = super().own_arguments(config)
        return found if config.orpo_alpha is None else found | {"beta": config.orpo_alpha}

    def arguments_class(self) -> type:
        from ebft.preferences.experimental import orpo

        return orpo.ORPOConfig

    def trainer_class(self) -> type:
        from ebft.preferences.experimental import ORPOTrainer

        return ORPOTrainer
