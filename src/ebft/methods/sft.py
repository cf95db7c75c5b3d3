"""Supervised fine-tuning on pairs and chats, or continual pretraining on raw text (`rl` is not set)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ebft.config.options import ThinkingOption
from ebft.config.section import Section, option_names
from ebft.errors import ModelError
from ebft.methods.base_config import zero_stage
from ebft.methods.method import CROSS_ENTROPY, Method

if TYPE_CHECKING:
    from ebft.data.load import LoadedRows
    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig


class SFTKeys(Section):
    """Keys of SFT."""

    chunked_cross_entropy: bool | None = None
    """Compute the cross-entropy of SFT from hidden states, in chunks of tokens with labels, so that the logits of all
    tokens are never in memory; values and gradients are the same. If unset, true, except with torch_compile, DeepSpeed
    ZeRO-3, and models whose loss has other terms, such as the loss of a router."""
    use_dynamic_finetuning: bool = False
    """Weight the cross-entropy of each token with its probability (DFT, arXiv:2508.05629)."""
    use_eaft: bool = False
    """Weight the cross-entropy of each token with the entropy, in nats, of the eaft_k most likely tokens, to the
    power of eaft_alpha (entropy-adaptive fine-tuning, EAFT). It is not divided by its maximum, ln eaft_k."""
    eaft_alpha: float = Field(1.0, ge=0, description="Exponent of the entropy, see use_eaft.")
    eaft_k: int = Field(20, ge=2, description="Number of tokens of the entropy, see use_eaft.")
    lisa_n_layers: Annotated[int, Field(ge=1)] | None = None
    """Train as many decoder layers at a time, drawn anew every lisa_step_interval steps, and all other weights (LISA,
    arXiv:2403.17919). Optimizer states of the other layers are dropped. SFT without an adapter, in one process."""
    lisa_step_interval: int = Field(20, ge=1, description="Steps with the same layers, see lisa_n_layers.")
    lisa_layers_attribute: str = Field("model.layers", description="Name of the list of layers, see lisa_n_layers.")
    liger_rope: bool = False
    """Use Liger's kernel for rotary embeddings (SFT; GPU, with the package liger-kernel)."""
    liger_rms_norm: bool = Field(False, description="Use Liger's kernel for RMSNorm, see liger_rope.")
    liger_glu_activation: bool = Field(False, description="Use Liger's kernel for gated layers, see liger_rope.")
    liger_layer_norm: bool = Field(False, description="Use Liger's kernel for LayerNorm, see liger_rope.")

    eval_sample_packing: bool | None = None
    """SFT: also pack held-out documents, with the same metrics. If unset, sample_packing."""
    batch_flattening: bool | Literal["auto"] = False
    """SFT: join the rows of each batch into one row without padding, in which documents do not attend to each other.
    auto: only with flash attention. Other implementations compute the attention of all tokens of the batch with a mask,
    so they are faster only if documents are short."""


class SFT(Method):
    """Cross-entropy on the labels of every row, with transformers' Trainer."""

    name = "SFT (rl is not set)"
    tag = "continual-pretraining"
    title = "SFT with the cross-entropy loss"
    metrics = ("loss", *CROSS_ENTROPY)
    rows = "tokens"
    view = "SFTView"
    keys = SFTKeys
    offloads_activations = True
    runs_plain_model = True
    reads_streams = True
    arguments = "transformers:TrainingArguments"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.chunked_cross_entropy and config.torch_compile:
            yield "chunked_cross_entropy is incompatible with torch_compile. Remove one."
        weighted = [key for key in ("use_dynamic_finetuning", "use_eaft") if getattr(config, key)]
        if len(weighted) + (config.chunked_cross_entropy is True) > 1:
            yield f"{weighted[0]} has a loss of its own. Remove the other loss, or chunked_cross_entropy."
        if weighted and config.overrides_of_model_config.output_router_logits:
            yield f"{weighted[0]} excludes overrides_of_model_config.output_router_logits. Remove one."
        for key in ("adapter", "unfrozen_parameters", "fsdp", "deepspeed", "streaming") if config.lisa_n_layers else ():
            if getattr(config, key):
                yield f"lisa_n_layers is not supported with {key}. Remove one."

    def problems(self, config: MethodConfig) -> Iterator[str]:
        if config.chunked_cross_entropy and zero_stage(config) == 3:
            yield "chunked_cross_entropy is not supported with ZeRO-3. Remove it, or set deepspeed: zero2 or fsdp."

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        if config.lisa_n_layers and machine.processes > 1:
            yield "lisa_n_layers is supported in one process only."
        asked = self._kernels(config)
        if asked and not machine.has_accelerator:
            warnings.warn(f"{', '.join(asked)}: no effect on CPU, where Liger's kernels do not run.", stacklevel=3)

    def missing_on_gpus(self, config: MethodConfig) -> Iterator[str]:
        asked = self._kernels(config)
        if asked and find_spec("liger_kernel") is None:
            yield f"{asked[0]} requires the package liger-kernel: pip install liger-kernel. Or remove it."

    def keeps_logits(self, config: MethodConfig) -> bool:
        return not self._may_be_in_chunks(config)

    def resolve(self, config: MethodConfig) -> None:
        """One warning for the sections of other methods; transforms read `ebft.mask_thinking_ce` in SFT too."""
        given = {"ebft": bool(config.ebft.model_fields_set - set(option_names(ThinkingOption)))}
        given |= {name: name in config.model_fields_set for name in ("trl", "vllm")}
        advice = " Set rl: ebft for energy-based fine-tuning." if any(given.values()) else ""
        self.warn_of_idle(config, *(name for name, is_given in given.items() if is_given), advice=advice)

    def load_rows(self, config: MethodConfig, tokenizer: Any) -> LoadedRows:
        if not config.streaming:
            return super().load_rows(config, tokenizer)
        from ebft.data.stream import load_stream

        return load_stream(config, tokenizer)

    def steps_per_epoch(self, config: MethodConfig, machine: Machine, rows: int) -> int:
        """A stream has no end, so the run is its only epoch."""
        return config.max_steps if config.streaming else super().steps_per_epoch(config, machine, rows)

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        # The collator selects the columns; transformers would also remove the documents of packed rows.
        own: dict[str, Any] = {"prediction_loss_only": True, "remove_unused_columns": False}
        if config.streaming:  # which every process reads
            own["accelerator_config"] = {"dispatch_batches": False}
        asked = self._kernels(config)
        if asked:  # all other kernels are switched off
            kernels = {name: key in asked for key, names in KERNELS.items() for name in names}
            own["liger_kernel_config"] = {**kernels, "cross_entropy": False, "fused_linear_cross_entropy": False}
            own["use_liger_kernel"] = True
        return own

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.documents import JoiningCollator, pack_rows
        from ebft.models.causal_lm import unwrap_adapter

        if common["args"].use_liger_kernel:
            check_kernels(unwrap_adapter(model).config.model_type, self._kernels(config))
        packs_held_out = config.sample_packing if config.eval_sample_packing is None else config.eval_sample_packing
        if packs_held_out and common["eval_dataset"] is not None:
            common["eval_dataset"] = pack_rows(common["eval_dataset"], config.sequence_len)
        if config.use_dynamic_finetuning or config.use_eaft:
            from ebft.sft.cross_entropy import weighted_cross_entropy

            entropy = {"alpha": config.eaft_alpha, "k": config.eaft_k} if config.use_eaft else {}
            common["compute_loss_func"] = partial(weighted_cross_entropy, **entropy)
        common["chunked_cross_entropy"] = config.chunked_cross_entropy if self._may_be_in_chunks(config) else False
        common["activation_offloading"] = config.activation_offloading and not common["args"].use_cpu
        if config.streaming:
            from ebft.data.stream import order_of
            from ebft.sft.trainer import StreamCollator, StreamTrainer

            common["data_collator"] = StreamCollator(tokenizer.pad_token_id)
            return StreamTrainer(order_of(config), packs=config.pretrain_multipack_attn, model=model, **common)
        from ebft.sft.trainer import SFTTrainer, TrainSomeLayers

        if config.lisa_n_layers:
            drawn = config.lisa_n_layers, config.lisa_step_interval, config.seed
            common["callbacks"] = [*common["callbacks"], TrainSomeLayers(model, config.lisa_layers_attribute, *drawn)]
        collator = JoiningCollator(tokenizer.pad_token_id)
        return SFTTrainer(model=model, data_collator=collator, batch_flattening=config.batch_flattening, **common)

    def _kernels(self, config: MethodConfig) -> list[str]:
        return [key for key in KERNELS if getattr(config, key)]

    def _may_be_in_chunks(self, config: MethodConfig) -> bool:
        excluded = config.torch_compile or config.use_dynamic_finetuning or config.use_eaft or zero_stage(config) == 3
        return config.chunked_cross_entropy is not False and not excluded


# Key -> what Liger calls it. Its kernel of gated layers has two names; a model has one.
KERNELS = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
}


def check_kernels(model_type: str, asked: list[str]) -> None:
    """Raise ModelError if Liger does not have a kernel for a type of models, which it would leave out silently."""
    found = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    known = inspect.signature(found).parameters if found else {}
    missing = [key for key in asked if not set(KERNELS[key]) & set(known)]
    if missing:
        raise ModelError(f"{', '.join(missing)}: Liger has no such kernel for {model_type} models. Remove it.")
