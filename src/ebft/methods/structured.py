"""Energy-based fine-tuning in structured mode: full completions of prompts, rewarded by feature matching
(`rl: ebft`, `ebft.mode: structured`). The rollouts, their options and their checks are the same as in GRPO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ebft.config import rules
from ebft.config.options import FeatureOptions, StridedOptions, StructuredOptions, ThinkingOption
from ebft.config.section import Section, option_names
from ebft.methods import strided
from ebft.methods.grpo import FEATURE_MATCHING, GRPO
from ebft.methods.method import CROSS_ENTROPY, FEATURES, EvaluationSampling, Method, Needs, pass_at, warn_of_unmet

if TYPE_CHECKING:
    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig


_NEEDS: Needs = (
    strided.NEED_OF_BASELINE,
    ("ebft.gt_length_multiplier", "adaptive_max_tokens: true", lambda c: c.ebft.adaptive_max_tokens),
    ("ebft.gt_length_floor", "adaptive_max_tokens: true", lambda c: c.ebft.adaptive_max_tokens),
)


class Structured(GRPO):
    """EBFTTrainer on rows of prompts with their references."""

    name = "structured mode (rl: ebft without ebft.mode: strided)"
    tag = "ebft"
    title = f"energy-based fine-tuning (structured mode; {strided.PAPER})"
    summary = Method.summary
    citation = strided.CITATION
    healthy = strided.HEALTHY
    keys = Section  # without NeMo Gym's, whose rows have no references
    needs_reference = True
    own_rewards = (FEATURE_MATCHING,)
    arguments = "ebft.structured:EBFTConfig"
    trainer = "ebft.structured:EBFTTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from strided.feature_conflicts(config)
        if config.ebft.rl_coef == 0:
            yield (
                "ebft.rl_coef: 0 has no effect in structured mode, whose policy-gradient term always has weight 1. "
                "Remove it, or train with the cross-entropy alone (leave out rl)."
            )
        yield from super().conflicts(config)

    def warn_of_idle_options(self, config: MethodConfig) -> None:
        strided.warn_of_options(StridedOptions, "strided", config)
        warn_of_unmet(config, _NEEDS)

    def problems(self, config: MethodConfig) -> Iterator[str]:
        yield from super().problems(config)
        ebft, trl = config.ebft, config.trl
        yield from rules.aggregation(trl.multi_objective_aggregation, ebft.advantage_estimator, rules.in_config)
        if not (ebft.alignment_coef or ebft.diversity_coef or ebft.ce_coef or trl.reward_funcs or trl.beta):
            yield (
                "ebft.alignment_coef: 0 with ebft.diversity_coef: 0 and ebft.ce_coef: 0: the loss is always 0, so "
                "nothing is trained. Set one above 0, or add rewards (trl.reward_funcs)."
            )

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        yield from super().problems_here(config, machine)
        yield from strided.missing_device(config, machine)

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        samples = pass_at(config.trl.num_generations)
        return (*FEATURES, *CROSS_ENTROPY, *samples, *super().held_out_metrics(config))

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        return replace(super().sampling(config), by_reference=strided.reference_limit(config))

    def cross_entropy(self, config: MethodConfig) -> dict[str, Any]:
        return {"ce_coef": config.ebft.ce_coef, "mask_thinking": config.ebft.mask_thinking_ce}

    def own_options(self) -> list[str]:
        return super().own_options() + option_names(StructuredOptions, FeatureOptions, ThinkingOption)
