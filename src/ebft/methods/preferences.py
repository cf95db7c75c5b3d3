"""What the preference methods share: keys, rows, checks and metrics. TRL computes the losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ebft.config.section import Section
from ebft.data.transforms import PreferenceColumns
from ebft.methods.method import Method, class_at
from ebft.models.files import adapted_head, adapted_heads

if TYPE_CHECKING:
    from ebft.data.load import LoadedRows
    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig
    from ebft.methods.views import RowView


class BetaKeys(Section):
    """The key of all preference methods."""

    rl_beta: float | None = Field(
        None,
        gt=0,
        description="Preference methods: strength of the reference model in the loss (tau of IPO), or the factor of "
        "the log-probabilities with simpo, whose paper uses 2 to 10. If unset, TRL's default, 0.1.",
    )


class ReferenceKeys(BetaKeys):
    """Keys of the methods with a reference model."""

    precompute_ref_log_probs: bool = Field(
        False,
        description="dpo, ipo, kto: compute the log-probabilities of the reference model before training, which "
        "saves the memory of the reference model.",
    )


# Columns of a mapping that only one kind of rows has.
_OF_KIND = {
    "preferences": ("field_chosen", "field_rejected", "chosen_format", "rejected_format"),
    "labelled": ("field_completion", "field_label", "completion_format"),
}


class PreferenceMethod(Method):
    """A loss that compares completions that are part of the data."""

    rows = "preferences"
    copy_name = "reference model"
    can_be_compared = False
    has_reference: ClassVar[bool] = True
    trainer: ClassVar[str]  # of `ebft.preferences`, module:class
    metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/accuracies", "rewards/margins")
    data: ClassVar[str] = "pairs of a chosen and a rejected completion"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        for key, value, reason in (
            ("sample_packing", config.sample_packing, "chosen and rejected completions are separate sequences"),
            ("group_by_length", config.group_by_length, "a row has several sequences"),
            ("train_on_inputs", config.train_on_inputs, "only completions are compared"),
            ("torch_compile", config.torch_compile, "it is not tested with TRL's losses"),
        ):
            if value:
                yield f"{key}: true is not supported by {self.name}: {reason}. Remove it."
        if config.deepspeed:
            yield f"deepspeed is not supported by {self.name}, where it is not tested. Set fsdp, or remove it for DDP."
        others = next(names for kind, names in _OF_KIND.items() if kind != self.rows)
        for entry in (*config.datasets, *config.test_datasets):
            given = entry.type.model_fields_set if isinstance(entry.type, PreferenceColumns) else ()
            for name in (name for name in others if name in given):
                yield f"datasets.type.{name} is not read by {self.name}, which trains on {self.data}. Remove it."
        if self.has_reference:
            yield from self._adapter_conflicts(config)

    def _adapter_conflicts(self, config: MethodConfig) -> Iterator[str]:
        """TRL multiplies with the weight of the head itself, without its adapter."""
        new = config.adapter and config.lora_model_dir is None
        for head in adapted_heads(config.lora_target_modules) if new else ():
            yield (
                f"lora_target_modules: {config.lora_target_modules!r} selects {head}, which is not supported by "
                f"{self.name}: TRL uses its weight without adapter. Leave it out."
            )
        if config.adapter and config.lora_modules_to_save and (config.fsdp or config.fsdp_config):
            yield (
                f"lora_modules_to_save is not supported with fsdp by {self.name}, where it is not tested. Remove one "
                "of them."
            )

    def problems(self, config: MethodConfig) -> Iterator[str]:
        yield from super().problems(config)
        if config.adapter and config.lora_model_dir is not None and self.has_reference:
            head = adapted_head(config.lora_model_dir)
            if head is not None:
                yield (
                    f"lora_model_dir: the adapter in {config.lora_model_dir} adapts {head}, which is not supported by "
                    f"{self.name}: TRL uses its weight without adapter. Merge the adapter into its base model (ebft "
                    "merge-lora), and set base_model to the result."
                )

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        if self.has_reference and config.precompute_ref_log_probs and machine.processes > 1:
            yield (
                "precompute_ref_log_probs: true is not supported with several processes, since TRL writes the results "
                "to a file of the first one. Remove it."
            )

    def resolve(self, config: MethodConfig) -> None:
        idle = [name for name in ("ebft", "trl", "vllm", "evaluation") if name in config.model_fields_set]
        if idle:
            warnings.warn(f"{', '.join(idle)}: no effect with {self.name}.", stacklevel=2)
        if config.budget.generated_tokens is not None:
            warnings.warn(
                f"budget.generated_tokens: no effect with {self.name}, which does not sample tokens.", stacklevel=2
            )
        if config.adapter and config.lora_dropout:
            warnings.warn(
                f"lora_dropout: no effect with {self.name}: TRL disables dropout, so that log-probabilities of the "
                "same weights are equal.",
                stacklevel=2,
            )

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        return self.metrics

    def load_rows(self, config: MethodConfig, tokenizer: Any) -> LoadedRows:
        from ebft.data.preferences import load_preference_rows

        return load_preference_rows(config, tokenizer)

    def copies_model(self, config: MethodConfig) -> bool:
        return self.has_reference and not config.precompute_ref_log_probs

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.methods.views import PreferenceView

        return PreferenceView(tokenizer)

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        """Rows fit into `sequence_len`, so TRL cuts nothing."""
        arguments = {"beta": config.rl_beta, "max_length": config.sequence_len}
        if self.has_reference:
            arguments["precompute_ref_log_probs"] = config.precompute_ref_log_probs
            arguments["activation_offloading"] = config.activation_offloading
            arguments["router_aux_loss_coef"] = 0.0  # TRL would take that of the model
        return arguments

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.preferences.trainers import without_router_loss

        without_router_loss(model)
        if not self.has_reference:
            return class_at(self.trainer)(model, **common)
        from ebft.models.causal_lm import frozen_copy

        is_new_adapter = config.adapter is not None and config.lora_model_dir is None
        needs_copy = config.adapter is None and not config.precompute_ref_log_probs
        reference = frozen_copy(model) if needs_copy else None  # before TRL changes the model's forward
        return class_at(self.trainer)(model, is_new_adapter=is_new_adapter, ref_model=reference, **common)
