"""Supervised fine-tuning on pairs and chats, or continual pretraining on raw text (`rl` is not set)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ebft.config.options import ThinkingOption
from ebft.config.section import Section, option_names
from ebft.methods.method import CROSS_ENTROPY, Method
from ebft.run.deepspeed import zero_stage

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig
    from ebft.preview.view import RowView


class SFTKeys(Section):
    """The keys of SFT."""

    chunked_cross_entropy: bool | None = Field(
        None,
        description="Compute the cross-entropy of SFT from hidden states, in chunks of tokens with labels, so that the "
        "logits of all tokens are never in memory; values and gradients are the same. If unset, true, except with "
        "torch_compile, DeepSpeed ZeRO-3, and models whose loss has other terms, such as that of a router.",
    )


class SFT(Method):
    """Cross-entropy on the labels of every row, with transformers' Trainer."""

    name = "SFT (rl is not set)"
    tag = "continual-pretraining"
    rows = "tokens"
    keys = SFTKeys
    offloads_activations = True
    runs_plain_model = True

    def summary(self, config: RunConfig) -> str:
        return "SFT with the cross-entropy loss"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.chunked_cross_entropy and config.torch_compile:
            yield (
                "chunked_cross_entropy is incompatible with torch_compile, which compiles the model's own loss. Remove "
                "one of them."
            )

    def problems(self, config: RunConfig) -> Iterator[str]:
        if config.chunked_cross_entropy and zero_stage(config) == 3:
            yield (
                "chunked_cross_entropy is incompatible with ZeRO-3, which gathers the output layer once in each pass. "
                "Remove it, or set deepspeed: zero2 or fsdp: true."
            )

    def keeps_logits(self, config: RunConfig) -> bool:
        return not self._may_be_in_chunks(config)

    def resolve(self, config: RunConfig) -> None:
        """One warning for the sections of other methods; transforms read `ebft.mask_thinking_ce` in SFT too."""
        idle = [name for name in ("trl", "vllm") if name in config.model_fields_set]
        if config.ebft.model_fields_set - set(option_names(ThinkingOption)):
            idle.insert(0, "ebft")
        if config.budget.generated_tokens is not None:
            warnings.warn(
                f"budget.generated_tokens: no effect with {self.name}, which does not sample tokens.", stacklevel=2
            )
        if idle:
            warnings.warn(
                f"{', '.join(idle)}: no effect with {self.name}. Set rl: ebft for energy-based fine-tuning.",
                stacklevel=2,
            )

    def held_out_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return ("loss", *CROSS_ENTROPY)

    def arrange(self, config: RunConfig, train: Any) -> Any:
        if config.sample_packing:
            warnings.warn(
                "sample_packing has no effect without `rl: ebft`: each document is a separate row", stacklevel=3
            )
        return train

    def row_view(self, config: RunConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.preview.sft import SFTView

        return SFTView(tokenizer)

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        return {"prediction_loss_only": True}

    def arguments_class(self) -> type:
        from transformers import TrainingArguments

        return TrainingArguments

    def build_trainer(self, config: RunConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.collator import DocumentCollator
        from ebft.sft import SFTTrainer

        chunked = config.chunked_cross_entropy if self._may_be_in_chunks(config) else False
        collator = DocumentCollator(tokenizer.pad_token_id)
        offloads = config.activation_offloading and not common["args"].use_cpu
        return SFTTrainer(
            model=model,
            data_collator=collator,
            chunked_cross_entropy=chunked,
            activation_offloading=offloads,
            **common,
        )

    def _may_be_in_chunks(self, config: RunConfig) -> bool:
        return config.chunked_cross_entropy is not False and not config.torch_compile and zero_stage(config) != 3
