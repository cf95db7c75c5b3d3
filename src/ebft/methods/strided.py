"""Energy-based fine-tuning in strided mode (`rl: ebft`, `ebft.mode: strided`): short rollouts along each document."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ebft.config import rules
from ebft.config.options import StridedOptions, StructuredOptions
from ebft.config.rules import check_trainable, resolve_single_sample
from ebft.config.section import option_names
from ebft.errors import ConfigError
from ebft.methods.ebft import (
    CITATION,
    HEALTHY,
    PAPER,
    feature_conflicts,
    missing_device,
    reference_limit,
    warn_of_options,
    warn_of_reward,
)
from ebft.methods.method import CROSS_ENTROPY, FEATURES, EvaluationSampling, Method, pass_at

if TYPE_CHECKING:
    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig
    from ebft.methods.views import RowView


class Strided(Method):
    """StridedEBFTTrainer on rows of tokens."""

    name = "strided mode"
    tag = "ebft"
    citation = CITATION
    healthy = HEALTHY
    rows = "tokens"
    samples_blocks = True
    phases = {"rollouts": "_sample", "features": "_embed", "log-probabilities": "_score"}
    arguments = "ebft.strided:StridedEBFTConfig"

    def summary(self, config: MethodConfig) -> str:
        return f"energy-based fine-tuning (strided mode; {PAPER})"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from feature_conflicts(config)

    def resolve(self, config: MethodConfig) -> None:
        warn_of_options(StructuredOptions, "structured", config, "trl", "vllm")
        estimator = config.ebft.advantage_estimator
        if "rloo_baseline" in config.ebft.model_fields_set and estimator != "rloo":
            warnings.warn(f"ebft.rloo_baseline: no effect with ebft.advantage_estimator: {estimator}.", stacklevel=2)
        resolve_single_sample(config.ebft)
        warn_of_reward(config)
        if config.train_on_inputs:
            reason = "anchors and cross-entropy of a row with a prompt are restricted to its completion"
            warnings.warn(f"train_on_inputs: true has no effect in strided mode: {reason}.", stacklevel=2)
        if config.torch_compile:
            config.torch_compile = False
            warnings.warn(rules.compiled(rules.in_config), stacklevel=2)

    def problems(self, config: MethodConfig) -> Iterator[str]:
        try:
            check_trainable(config.ebft)
        except ConfigError as error:
            yield str(error)
        unusable = rules.single_pass(config.ebft, config.gradient_checkpointing, rules.in_config)
        if unusable:
            yield unusable
        first, length = config.ebft.context_length, config.ebft.generate_max_len
        if first + length > config.sequence_len:
            yield (
                f"ebft.context_length: {first} plus ebft.generate_max_len: {length} exceeds sequence_len: "
                f"{config.sequence_len}. Lower them, or set sequence_len to at least {first + length}."
            )

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        yield from missing_device(config, machine)

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        return (*FEATURES, *CROSS_ENTROPY, *pass_at(max(2, config.ebft.n_samples_per_prompt)))

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        return EvaluationSampling(config.ebft.n_samples_per_prompt, by_reference=reference_limit(config))

    def samples_per_group(self, config: MethodConfig) -> int:
        return config.ebft.n_samples_per_prompt

    def compares_features(self, config: MethodConfig) -> bool:
        return True

    def arrange(self, config: MethodConfig, train: Any) -> Any:
        from ebft.data.batches import pack_and_report

        return pack_and_report(train, config.sequence_len) if config.sample_packing else train

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.methods.views import StridedView

        return StridedView(config.ebft, tokenizer)

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return {name: getattr(config.ebft, name) for name in option_names(StridedOptions)}

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.batches import DocumentCollator
        from ebft.strided import StridedEBFTTrainer

        collator = DocumentCollator(tokenizer.pad_token_id, with_prompt_length=True)
        return StridedEBFTTrainer(model=model, data_collator=collator, **common)
