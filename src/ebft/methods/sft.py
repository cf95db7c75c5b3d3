"""Supervised fine-tuning on pairs and chats, or continual pretraining on raw text (`rl` is not set)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ebft.config.options import ThinkingOption
from ebft.config.section import option_names
from ebft.methods.method import CROSS_ENTROPY, Method

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig
    from ebft.preview.view import RowView


class SFT(Method):
    """Cross-entropy on the labels of every row, with transformers' Trainer."""

    name = "SFT (rl is not set)"
    tag = "continual-pretraining"
    rows = "tokens"
    runs_plain_model = True
    keeps_logits = True

    def summary(self, config: RunConfig) -> str:
        return "SFT with the cross-entropy loss"

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

        return SFTTrainer(model=model, data_collator=DocumentCollator(tokenizer.pad_token_id), **common)
