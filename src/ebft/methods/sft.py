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
    from ebft.data.load import LoadedRows
    from ebft.preview.view import RowView
    from ebft.run.checks import Machine


class SFT(Method):
    """Cross-entropy on the labels of every row, with transformers' Trainer."""

    name = "SFT (rl is not set)"
    tag = "continual-pretraining"
    rows = "tokens"
    runs_plain_model = True
    keeps_logits = True
    reads_streams = True

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

    def load_rows(self, config: RunConfig, tokenizer: Any) -> LoadedRows:
        if not config.streaming:
            return super().load_rows(config, tokenizer)
        from ebft.data.streaming.load import load_stream

        return load_stream(config, tokenizer)

    def arrange(self, config: RunConfig, train: Any) -> Any:
        if config.sample_packing and not config.streaming:
            warnings.warn(
                "sample_packing has no effect without `rl: ebft`: each document is a separate row", stacklevel=3
            )
        return train

    def row_view(self, config: RunConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.preview.sft import SFTView

        return SFTView(tokenizer)

    def steps_per_epoch(self, config: RunConfig, machine: Machine, rows: int) -> int:
        """A stream has no end, so the run is its only epoch."""
        return config.max_steps if config.streaming else super().steps_per_epoch(config, machine, rows)

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        own: dict[str, Any] = {"prediction_loss_only": True}
        if config.streaming:  # each process reads the stream; rows have a position, which no model has an argument for
            own |= {"accelerator_config": {"dispatch_batches": False}, "remove_unused_columns": False}
        return own

    def arguments_class(self) -> type:
        from transformers import TrainingArguments

        return TrainingArguments

    def build_trainer(self, config: RunConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        if config.streaming:
            return self._stream_trainer(config, model, tokenizer, **common)
        from ebft.data.collator import DocumentCollator
        from ebft.sft import SFTTrainer

        return SFTTrainer(model=model, data_collator=DocumentCollator(tokenizer.pad_token_id), **common)

    def _stream_trainer(self, config: RunConfig, model: Any, tokenizer: Any, **common: Any) -> Any:
        from ebft.data.streaming.load import order_of
        from ebft.over_transformers import attention_of
        from ebft.streams.collator import StreamCollator
        from ebft.streams.trainer import StreamTrainer

        apart = config.pretrain_multipack_attn
        flatten = apart and "flash" in attention_of(model)
        collator = StreamCollator(tokenizer.pad_token_id, flatten=flatten)
        return StreamTrainer(order_of(config), apart, model=model, data_collator=collator, **common)
