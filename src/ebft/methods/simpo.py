"""SimPO (`rl: simpo`): mean log-probabilities with a target margin, with the CPO trainer of trl.experimental."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from ebft.methods.preferences import BetaKeys, PreferenceMethod

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


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

    def summary(self, config: RunConfig) -> str:
        return "simple preference optimization (SimPO)"

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        own = {"loss_type": "simpo", "simpo_gamma": config.simpo_gamma, "cpo_alpha": config.cpo_alpha}
        return super().own_arguments(config) | own

    def arguments_class(self) -> type:
        from ebft.preferences.experimental import cpo

        return cpo.CPOConfig

    def trainer_class(self) -> type:
        from ebft.preferences.experimental import CPOTrainer

        return CPOTrainer
