"""KTO (`rl: kto`): TRL's KTOTrainer on single completions that are labelled desirable or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ebft.methods.preferences import PreferenceMethod, ReferenceKeys

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig


class KTOKeys(ReferenceKeys):
    """Keys of `rl: kto`."""

    kto_desirable_weight: float | None = Field(
        None, ge=0, description="Weight of the losses of desirable completions. If unset, 1."
    )
    kto_undesirable_weight: float | None = Field(
        None, ge=0, description="Weight of the losses of undesirable completions. If unset, 1."
    )


class KTO(PreferenceMethod):
    """KTOTrainer, whose KL term pairs the rows of a batch."""

    name = "rl: kto"
    tag = "kto"
    rows = "labelled"
    keys = KTOKeys
    offloads_activations = True
    metrics = ("loss", "rewards/margins")
    data = "completions with a label"
    arguments = "trl:KTOConfig"
    trainer = "ebft.preferences.trainers:KTOTrainer"

    def summary(self, config: MethodConfig) -> str:
        return "Kahneman-Tversky optimization (KTO)"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        for key in ("micro_batch_size", "eval_batch_size"):
            if getattr(config, key) == 1:
                yield (
                    f"{key}: 1 is not supported by rl: kto, which estimates its KL term with completions of other rows "
                    "of the batch. Set at least 2."
                )

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {
            "desirable_weight": config.kto_desirable_weight,
            "undesirable_weight": config.kto_undesirable_weight,
        }
