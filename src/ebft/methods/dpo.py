"""DPO (`rl: dpo`): TRL's DPOTrainer on pairs of completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ebft.methods.preferences import PreferenceMethod, ReferenceKeys

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig

Loss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
_UNWEIGHTED = ("aot", "aot_unpaired")


class DPOKeys(ReferenceKeys):
    """Keys of `rl: dpo`."""

    dpo_loss_type: Loss | Annotated[list[Loss], Field(min_length=1)] | None = Field(
        None, description="Loss of TRL's DPOTrainer, or a list of losses that are added. If unset, sigmoid."
    )
    dpo_loss_weights: list[float] | None = Field(
        None, description="Weight of each loss of dpo_loss_type, if it is a list. If unset, 1 for each."
    )
    dpo_label_smoothing: float | None = Field(
        None,
        ge=0,
        lt=0.5,
        description="Probability that a label is wrong, for dpo_loss_type: robust, exo_pair, aot and aot_unpaired. If "
        "unset, 0.",
    )
    dpo_use_weighting: bool = Field(
        False, description="Weight pairs by the probability that the policy gives them (WPO)."
    )


class DPO(PreferenceMethod):
    """DPOTrainer with the losses of `dpo_loss_type`."""

    name = "rl: dpo"
    tag = "dpo"
    keys = DPOKeys
    offloads_activations = True
    arguments = "trl:DPOConfig"
    trainer = "ebft.preferences.trainers:DPOTrainer"

    def summary(self, config: MethodConfig) -> str:
        return f"direct preference optimization (loss {', '.join(_losses(config))})"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        losses, weights = _losses(config), config.dpo_loss_weights
        if weights is not None and len(weights) != len(losses):
            yield f"dpo_loss_weights has {len(weights)} weights for {len(losses)} losses. Set one for each loss."
        if config.dpo_label_smoothing and not set(losses) & set(_SMOOTHED):
            yield (
                f"dpo_label_smoothing has no effect with dpo_loss_type: {', '.join(losses)}. Remove it, or use one of "
                f"{', '.join(_SMOOTHED)} (robust is the sigmoid loss with noisy labels)."
            )
        if "exo_pair" in losses and not config.dpo_label_smoothing:
            yield "dpo_loss_type: exo_pair needs dpo_label_smoothing above 0, for example 1e-3."
        if config.dpo_use_weighting and set(losses) & set(_UNWEIGHTED):
            yield f"dpo_use_weighting is not supported with dpo_loss_type: {', '.join(_UNWEIGHTED)}. Remove it."

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {
            "loss_type": _losses(config),
            "loss_weights": config.dpo_loss_weights,
            "label_smoothing": config.dpo_label_smoothing,
            "use_weighting": config.dpo_use_weighting,
        }


def _losses(config: MethodConfig) -> list[str]:
    given = config.dpo_loss_type or "sigmoid"
    return [given] if isinstance(given, str) else given


_OF_DPO = ("dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing")


class IPO(DPO):
    """The squared distance of the difference of mean log-ratios to 1 / (2 rl_beta)."""

    name = "rl: ipo"
    tag = "ipo"
    keys = DPOKeys

    def summary(self, config: MethodConfig) -> str:
        return "identity preference optimization (IPO)"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from PreferenceMethod.conflicts(self, config)
        for key in _OF_DPO:
            if getattr(config, key) is not None:
                yield f"{key} is incompatible with rl: ipo, whose loss is fixed. Remove it, or set rl: dpo."

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {"loss_type": ["ipo"]}
