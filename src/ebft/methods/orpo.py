"""ORPO (`rl: orpo`): the cross-entropy on chosen texts and an odds-ratio loss, with the trainer of trl.experimental."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ebft.methods.preferences import BetaKeys, PreferenceMethod

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig


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
    arguments = "ebft.preferences.experimental:orpo.ORPOConfig"
    trainer = "ebft.preferences.experimental:ORPOTrainer"

    def summary(self, config: MethodConfig) -> str:
        return "odds ratio preference optimization (ORPO)"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.orpo_alpha is not None and config.rl_beta not in (None, config.orpo_alpha):
            yield "orpo_alpha and rl_beta are two names of the same weight with rl: orpo. Keep one of them."

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        found = super().own_arguments(config)
        return found if config.orpo_alpha is None else found | {"beta": config.orpo_alpha}


class SimPOKeys(BetaKeys):
    """Keys of `rl: simpo`."""

    simpo_gamma: float | None = Field(
        None, ge=0, description="simpo: target margin between chosen and rejected. If unset, TRL's default, 0.5."
    )
    cpo_alpha: float = Field(0.0, ge=0, description="simpo: weight of the cross-entropy on chosen completions.")


class SimPO(PreferenceMethod):
    """CPOTrainer of trl.experimental with the loss of SimPO."""

    name = "rl: simpo"
    tag = "simpo"
    keys = SimPOKeys
    has_reference = False
    arguments = "ebft.preferences.experimental:cpo.CPOConfig"
    trainer = "ebft.preferences.experimental:CPOTrainer"

    def summary(self, config: MethodConfig) -> str:
        return "simple preference optimization (SimPO)"

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        own = {"loss_type": "simpo", "simpo_gamma": config.simpo_gamma, "cpo_alpha": config.cpo_alpha}
        return super().own_arguments(config) | own
