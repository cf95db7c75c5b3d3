"""Energy-based fine-tuning (`rl: ebft`). Strided mode (`ebft.mode: strided`) has short rollouts along each document;
structured mode has full completions of prompts, with the rollouts, options and checks of GRPO.

What both share stands between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ebft.config import rules
from ebft.config.options import CudaGraphsOption, FeatureOptions, StridedOptions, StructuredOptions, ThinkingOption
from ebft.config.section import Section, option_names
from ebft.errors import warn
from ebft.methods import method
from ebft.methods.base_config import zero_stage
from ebft.methods.grpo import FEATURE_MATCHING, GRPO
from ebft.methods.method import CROSS_ENTROPY, FEATURES, EvaluationSampling, Method, Needs, pass_at, warn_of_unmet

if TYPE_CHECKING:
    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig
    from ebft.methods.views import RowView


CITATION = """\
@article{jelassi2026matching,
  title   = {Matching Features, Not Tokens: Energy-Based Fine-Tuning of Language Models},
  author  = {Jelassi, Samy and Kwun, Mujin and Zhao, Rosie and Li, Yuanzhi and Fusi, Nicolo and Du, Yilun and
             Kakade, Sham M. and Domingo-Enrich, Carles},
  journal = {arXiv preprint arXiv:2603.12248},
  year    = {2026}
}"""
HEALTHY = {"grad_norm": (None, 3.0), "whitened alignment": (0.3, 1.9), **method.HEALTHY_ROLLOUTS}
NEED_OF_BASELINE = ("ebft.rloo_baseline", "advantage_estimator: rloo", lambda c: c.ebft.advantage_estimator == "rloo")
PAPER = "Jelassi et al. 2026, [arXiv 2603.12248](https://arxiv.org/abs/2603.12248)"


class Strided(Method):
    """StridedEBFTTrainer on rows of tokens."""

    name = "strided mode"
    tag = "ebft"
    title = f"energy-based fine-tuning (strided mode; {PAPER})"
    citation = CITATION
    healthy = HEALTHY
    rows = "tokens"
    samples_blocks = True
    phases = {"rollouts": "_sample", "features": "_embed", "log-probabilities": "_score"}
    arguments = "ebft.strided:StridedEBFTConfig"
    trainer = "ebft.strided:StridedEBFTTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from rules.feature_device(config.ebft.feature_device, config.adapter is not None, rules.in_config)

    def resolve(self, config: MethodConfig) -> None:
        warn_of_options(StructuredOptions, "structured", config, "trl", "vllm")
        method.warn_of_unmet(config, (NEED_OF_BASELINE,))
        rules.resolve_single_sample(config.ebft)
        rules.warn_of_reward(config.ebft)
        if config.train_on_inputs:
            reason = "anchors and cross-entropy of a row with a prompt are restricted to its completion"
            warn(f"train_on_inputs: true has no effect in strided mode: {reason}.")
        if config.torch_compile:
            config.torch_compile = False
            warn(rules.compiled(rules.in_config))

    def problems(self, config: MethodConfig) -> Iterator[str]:
        yield from rules.untrainable(config.ebft)
        is_sharded = bool(config.fsdp) or zero_stage(config) == 3
        yield from rules.passes(config.ebft, config.gradient_checkpointing, is_sharded, rules.in_config)
        first, length = config.ebft.context_length, config.ebft.generate_max_len
        if first + length > config.sequence_len:
            yield (
                f"ebft.context_length: {first} plus ebft.generate_max_len: {length} exceeds sequence_len: "
                f"{config.sequence_len}. Lower them, or set sequence_len to at least {first + length}."
            )

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        yield from missing_device(config, machine)

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        return (*FEATURES, *CROSS_ENTROPY, *method.pass_at(max(2, config.ebft.n_samples_per_prompt)))

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        return EvaluationSampling(config.ebft.n_samples_per_prompt, by_reference=reference_limit(config))

    def samples_per_group(self, config: MethodConfig) -> int:
        return config.ebft.n_samples_per_prompt

    def compares_features(self, config: MethodConfig) -> bool:
        return True

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.data.documents import block_options
        from ebft.methods.views import StridedView

        return StridedView(config.ebft, block_options(config, config.ebft, tokenizer), tokenizer)

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        options = {name: getattr(config.ebft, name) for name in option_names(StridedOptions)}
        are_cut = config.excess_length_strategy not in ("drop", "raise")
        return options | {"log_rollouts": config.log_rollouts, "max_length": config.sequence_len if are_cut else None}

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.documents import DocumentCollator

        collator = DocumentCollator(tokenizer.pad_token_id, with_prompt_length=True)
        return super().build_trainer(config, model, tokenizer, server, data_collator=collator, **common)


def missing_device(config: MethodConfig, machine: Machine) -> Iterator[str]:
    """The configured device of the feature network, if this machine does not have it."""
    device = config.ebft.feature_device
    if device is not None and device not in machine.devices:
        yield f"ebft.feature_device: {device!r} is unavailable. Choose from {', '.join(machine.devices)}, or remove it."


def warn_of_options(options: type, of_mode: str, config: MethodConfig, *sections: str) -> None:
    """One warning for the `options` of `ebft:` and the sections that only the other mode reads."""
    shared = {*option_names(FeatureOptions), *option_names(CudaGraphsOption)}
    foreign = (set(option_names(options)) - shared) & config.ebft.model_fields_set
    foreign -= rules.samples_in_effect(config.ebft, config.trl)
    idle = [f"ebft.{key}" for key in sorted(foreign)] + [key for key in sections if key in config.model_fields_set]
    if idle:
        samples = f" Samples have trl.temperature: {config.trl.temperature:g}." if "ebft.temperature" in idle else ""
        warn(f"{', '.join(idle)}: no effect on training in {config.ebft.mode} mode, only in {of_mode} mode.{samples}")


def reference_limit(config: MethodConfig) -> tuple[float, int] | None:
    """Length limit of a completion: multiple of the reference length, minimum number of tokens. None if disabled."""
    ebft = config.ebft
    return (ebft.gt_length_multiplier, ebft.gt_length_floor) if ebft.adaptive_max_tokens else None


_NEEDS: Needs = (
    NEED_OF_BASELINE,
    ("ebft.gt_length_multiplier", "adaptive_max_tokens: true", lambda c: c.ebft.adaptive_max_tokens),
    ("ebft.gt_length_floor", "adaptive_max_tokens: true", lambda c: c.ebft.adaptive_max_tokens),
)


class Structured(GRPO):
    """EBFTTrainer on rows of prompts with their references."""

    name = "structured mode (rl: ebft without ebft.mode: strided)"
    tag = "ebft"
    title = f"energy-based fine-tuning (structured mode; {PAPER})"
    summary = Method.summary
    citation = CITATION
    healthy = HEALTHY
    keys = Section  # without NeMo Gym's, whose rows have no references
    needs_reference = True
    own_rewards = (FEATURE_MATCHING,)
    arguments = "ebft.structured:EBFTConfig"
    trainer = "ebft.structured:EBFTTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from rules.feature_device(config.ebft.feature_device, config.adapter is not None, rules.in_config)
        if config.ebft.rl_coef == 0:
            yield "ebft.rl_coef: 0 has no effect in structured mode. Remove it; cross-entropy alone is without rl."
        yield from super().conflicts(config)

    def warn_of_idle_options(self, config: MethodConfig) -> None:
        warn_of_options(StridedOptions, "strided", config)
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
        yield from missing_device(config, machine)

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        samples = pass_at(config.trl.num_generations)
        return (*FEATURES, *CROSS_ENTROPY, *samples, *super().held_out_metrics(config))

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        return replace(super().sampling(config), by_reference=reference_limit(config))

    def cross_entropy(self, config: MethodConfig) -> dict[str, Any]:
        return {"ce_coef": config.ebft.ce_coef, "mask_thinking": config.ebft.mask_thinking_ce}

    def own_options(self) -> list[str]:
        return super().own_options() + option_names(StructuredOptions, FeatureOptions, ThinkingOption)
