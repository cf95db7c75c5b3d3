"""SFT with transformers' Trainer, the loss in chunks; evaluation reports the same cross-entropies as other methods.

On a stream of rows, each checkpoint contains the position in the stream, from which training continues.

B  rows   S  tokens   V  vocabulary
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, TrainerCallback

from ebft import errors, scores
from ebft.data.documents import JoiningCollator, PackedRows
from ebft.data.stream import SKIPPED, Position
from ebft.data.transforms.rows import IGNORE
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import keep_output_dtype
from ebft.models.weights import round_weights, suspend_rounding
from ebft.monitor.metrics import HeldOutMeans
from ebft.prefix.forward import take_programs
from ebft.sft import packed
from ebft.sft.cross_entropy import check_chunks, summed_cross_entropy, token_cross_entropies, why_not_in_chunks
from ebft.trainer import OverTrainer
from ebft.transformers_internals import has_flash_attention

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def coefficient(causal_lm: PreTrainedModel) -> float:
    """The weight with which a mixture of experts adds its load-balancing loss."""
    pairs = [(holder, name) for holder in (causal_lm, causal_lm.config.get_text_config()) for name in _COEFFICIENTS]
    with errors.doing("reading the weight of the load-balancing loss (overrides_of_model_config.output_router_logits)"):
        return next(float(getattr(holder, name)) for holder, name in pairs if hasattr(holder, name))


_HELD_OUT = ("ce_loss", "ce_loss_all", "router_loss")


class SFTTrainer(OverTrainer):
    """Supervised fine-tuning with the cross-entropy loss.

    Rows may be packed (`pack_rows`) if the collator is a JoiningCollator; `batch_flattening` joins the rows of each
    batch into one without padding, with "auto" only if the model has flash attention. For models that do not separate
    documents in a row, each document of a packed row is computed as a row, with a warning, and `batch_flattening`
    raises ModelError.

    chunked_cross_entropy: compute it from the hidden states, in chunks of positions with labels, so that the logits of
    all tokens are never in memory; None: if the loss has no other terms (terms of the model, label smoothing, a
    function of yours). Raises ModelError if it is true and the loss has.
    activation_offloading: keep activations in main memory between forward and backward, with TRL's hooks.

    The load-balancing loss of a mixture of experts is weighted with a micro-batch's share of the step's labels.
    """

    def __init__(
        self,
        *args: Any,
        batch_flattening: bool | str = False,
        chunked_cross_entropy: bool | None = None,
        activation_offloading: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        causal_lm = unwrap_adapter(self.model)
        has_flash = has_flash_attention(causal_lm)
        self._flattens: bool = has_flash if batch_flattening == "auto" else bool(batch_flattening)
        # Flash attention takes the boundaries of documents in a single row only, and the auxiliary loss of routers
        # counts every token that no attention mask excludes.
        self._joins_packed = has_flash or getattr(causal_lm.config.get_text_config(), "output_router_logits", False)
        self._is_unchecked, self._unpacks = True, False
        packs = any(isinstance(rows, PackedRows) for rows in (self.train_dataset, self.eval_dataset))
        if packs or self._flattens:
            self._unpack_if(packed.why_not_joined(self.model))
        self.offloading: AbstractContextManager[Any] = nullcontext()
        if activation_offloading:
            from trl.models import get_act_offloading_ctx_manager  # other runs do not need TRL

            self.offloading = get_act_offloading_ctx_manager(self.model)
        why_not = why_not_in_chunks(unwrap_adapter(self.model))
        if self.args.torch_compile:
            why_not = "torch_compile would compile it again in every step"
        if self.label_smoother is not None or self.compute_loss_func is not None:
            why_not = "label_smoothing_factor and compute_loss_func need the logits"
        if chunked_cross_entropy and why_not is not None:
            raise errors.ModelError(f"chunked_cross_entropy is not supported: {why_not}. Remove it.")
        self.is_in_chunks: bool = chunked_cross_entropy is not False and why_not is None
        self._checks_chunks = self.is_in_chunks
        if self.is_in_chunks:
            keep_output_dtype(self.accelerator)
            take_programs(self.model)

    def is_padding_free(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the rows of a batch are joined into one."""
        return self._flattens or ("position_ids" in inputs and self._joins_packed)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self._check_once(model, inputs)
        self.budget.add(documents=packed.count_documents(inputs))
        parts = [inputs]
        if self._unpacks and "position_ids" in inputs:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # else, losses are means
            parts = [part for part, _ in packed.in_own_rows(inputs, counts and self._may_divide())]
        loss = torch.zeros((), device=self.args.device)
        for part in parts:
            with self.offloading:
                loss = loss + super().training_step(model, part, num_items_in_batch)
        return loss

    def _may_divide(self) -> bool:
        """Whether a batch may have several passes: processes with other numbers of passes would wait for each other."""
        return self.args.world_size == 1 and not self.is_deepspeed_enabled

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss, computed in chunks. The outputs are the `token_losses` of labels, or of tokens without
        a label, instead of logits.

        As in transformers, it is a mean over the labels of all batches of a step on all processes, if those are
        counted, and else over the labels of the batch.
        """
        inputs = packed.model_inputs(inputs, self.is_padding_free(inputs))
        if not self.is_in_chunks:
            return self._own_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"][:, 1:]
        inputs, learned = {name: value for name, value in inputs.items() if name != "labels"}, labels.ne(IGNORE)
        counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        count = num_items_in_batch if counts else learned.sum()
        outputs = None
        if return_outputs:
            tokens = inputs["input_ids"][:, 1:]
            real = inputs["attention_mask"][:, 1:].bool() if "attention_mask" in inputs else torch.ones_like(learned)
            targets = labels.where(learned, tokens)[..., None]
            outputs = token_cross_entropies(model, inputs, targets, real | learned).squeeze(-1)
            loss = (outputs * learned).sum() / count
        else:
            loss = summed_cross_entropy(model, inputs, labels, learned) / count
        if counts and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, {"loss": loss, "token_losses": outputs}) if return_outputs else loss

    def _own_loss(self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool, num_items: Any) -> Any:
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
        loss, outputs = super().compute_loss(model, inputs, True, num_items)
        added = self.router_loss(outputs)
        if added is not None and num_items is not None:  # otherwise, Trainer divides by the micro-batches
            share, scale = labels.ne(IGNORE).sum() / num_items, 1
            if self.args.average_tokens_across_devices:  # then Trainer has multiplied the loss
                scale = self.accelerator.num_processes // self.get_tp_size()
            loss = loss - scale * added * (1 - share)
        return (loss, outputs) if return_outputs else loss

    def router_loss(self, outputs: Any) -> Tensor | None:
        """The term that the model has added to its loss, with its coefficient. None if it has added none."""
        found = outputs.get("aux_loss")
        if found is None or self.label_smoother is not None or self.compute_loss_func is not None:
            return None
        return coefficient(unwrap_adapter(self.model)) * found.to(outputs["loss"].device)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        rows = len(dataloader.dataset) if hasattr(dataloader.dataset, "__len__") else None
        self._held_out = {name: HeldOutMeans(self.accelerator, rows) for name in _HELD_OUT}
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = {name: mean for held_out in self._held_out.values() for name, mean in held_out.means().items()}
        router_loss = means.pop("router_loss", 0.0)
        if "ce_loss" in means:  # transformers' eval_loss is a mean over batches, which depends on their size
            output.metrics[f"{metric_key_prefix}_loss"] = means["ce_loss"] + router_loss
        means |= scores.perplexities(means)
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        self._check_once(model, inputs)
        inputs = self._prepare_inputs(inputs)
        if self._unpacks and "position_ids" in inputs:
            parts, places = zip(*packed.in_own_rows(inputs, self._may_divide()))
            losses, nlls, router_losses = zip(*(self._held_out_losses(model, part) for part in parts))
            nll, loss = packed.in_packed_rows(nlls, places, inputs["attention_mask"]), torch.stack(losses).mean()
            router_loss = None if router_losses[0] is None else torch.stack(router_losses).mean()
        else:
            loss, nll, router_loss = self._held_out_losses(model, inputs)
        real = packed.has_label(inputs)
        masks = {"ce_loss": real & inputs["labels"][:, 1:].ne(IGNORE), "ce_loss_all": real}
        for name, mask in masks.items():
            counts = mask.sum(-1)
            self._held_out[name].add({name: (nll * mask).sum(-1) / counts.clamp_min(1)}, counts)
        if router_loss is not None:
            counts = masks["ce_loss"].sum(-1)
            self._held_out["router_loss"].add({"router_loss": router_loss.expand(len(counts))}, counts)
        return loss.detach(), None, None

    def _held_out_losses(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss of a batch (B, S), the losses (B, S - 1) of its tokens, and the routers' loss if it is added."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, dict(inputs), return_outputs=True)
        padding_free = self.is_padding_free(inputs)
        if self.is_in_chunks:
            nll = outputs["token_losses"]
        else:
            given = packed.model_inputs(inputs, padding_free)
            targets = given["labels"].where(given["labels"].ne(IGNORE), given["input_ids"])
            logits = outputs["logits"][:, :-1].float().transpose(1, 2)
            nll = F.cross_entropy(logits, targets[:, 1:], reduction="none")
        nll = packed.in_rows(nll, inputs["attention_mask"]) if padding_free else nll
        return loss, nll, self.router_loss(outputs)

    def _check_once(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        joins = self._is_unchecked and not self._unpacks and (self._flattens or "position_ids" in inputs)
        if not (self._checks_chunks or joins):
            return
        rounds = suspend_rounding(self.model)  # scales of float8 depend on all tokens of a pass
        self._check(model, inputs, joins)
        if rounds:
            round_weights(self.model)

    def _check(self, model: nn.Module, inputs: dict[str, Tensor], joins: bool) -> None:
        """Compare chunks with the model's own logits before the first batch, when the model is placed and sharded, and
        packed with separate documents before the first packed batch.
        """
        if self._checks_chunks:
            with self.accelerator.autocast():
                check_chunks(model, unwrap_adapter(self.model))
            self._checks_chunks = False
        if not joins:
            return
        reason = packed.why_not_joined(self.model)
        if reason is None:
            # A compiled model would be compiled for the rows of the comparison.
            model = self.model if self.args.torch_compile else model
            with self.accelerator.autocast():
                reason = packed.why_not_separated(model, unwrap_adapter(self.model), self.is_padding_free(inputs))
        self._unpack_if(reason)
        self._is_unchecked = False

    def _unpack_if(self, reason: str | None) -> None:
        """Compute the documents of packed rows as separate rows if there is a `reason` why they cannot share a row."""
        if reason is None:
            return
        if self._flattens:
            raise errors.ModelError(f"{reason}. Remove batch_flattening, or set another attn_implementation")
        self._unpacks = True
        errors.warn(
            f"{reason}. So the documents of packed rows are computed as separate rows: the results equal "
            "separate documents, but a step takes more time than with one row"
            f"{'' if self._may_divide() else ', and memory, since all are padded to the longest'}."
        )


_SAVED_AS = "Stream"  # among the `stateful_callbacks` of trainer_state.json


class StreamTrainer(SFTTrainer):
    """SFT on the rows of a `StreamRows`. `order`: the settings that positions depend on, by config key.

    `packs`: whether the documents of a row do not see each other.

    Every process reads the whole stream and trains on its part of each batch, so that the rows of a step do not depend
    on the number of processes.
    """

    position: Position  # after the last row that this process has trained on

    def __init__(self, order: dict[str, Any], packs: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.position = Position()
        self.add_callback(_KeepPosition(self, order))
        if packs:
            self._unpack_if(packed.why_not_joined(self.model))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.position = inputs.pop("position")
        self.budget.add(documents=inputs.pop("pieces") - packed.count_documents(inputs))  # which SFTTrainer adds
        return super().training_step(model, inputs, num_items_in_batch)

    @property
    def rows_per_step(self) -> int:
        """Rows of all processes in an optimizer step."""
        return self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size


class _KeepPosition(TrainerCallback):
    """Writes the position of each completed step to the trainer's state, and continues from it after resuming."""

    def __init__(self, trainer: StreamTrainer, order: dict[str, Any]) -> None:
        self._trainer, self._order = trainer, order
        self._first = self._first_step = 0  # row and step that this run started at

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(_SAVED_AS)
        if state.global_step == 0:
            return
        with errors.doing("reading the position in the stream in the checkpoint (streaming)"):
            order = saved["order"]  # with other settings, a position would be another one
        changed = [
            f"{key}: {now} instead of {order.get(key)}" for key, now in self._order.items() if order.get(key) != now
        ]
        if changed:
            raise errors.ConfigError(
                f"The stream differs from the checkpoint's: {'; '.join(changed)}. Restore these keys."
            )
        self._first, self._first_step = saved["rows"], state.global_step
        skipped = state.global_step * self._trainer.rows_per_step
        self._trainer.train_dataset.continue_from(Position(**saved["position"]), saved["rows"], skipped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = self._first + (state.global_step - self._first_step) * self._trainer.rows_per_step
        position = asdict(self._trainer.position)
        state.stateful_callbacks[_SAVED_AS] = {"rows": rows, "position": position, "order": self._order}


class StreamCollator(JoiningCollator):
    """`JoiningCollator` that also collates rows of a stream.

    Their batch also has `position`, after its last row, and `pieces`, the number of documents. Rows of steps before a
    checkpoint make an empty batch.
    """

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if rows[0] == SKIPPED:
            return {}
        batch: dict[str, Any] = super().__call__(rows)
        if "position" in rows[0]:
            batch |= {"position": rows[-1]["position"], "pieces": sum(row["pieces"] for row in rows)}
        return batch


class TrainSomeLayers(TrainerCallback):
    """Trains `count` of the layers `name` at a time, drawn for each `interval` of steps (LISA, algorithm 1 of
    arXiv:2403.17919)."""

    def __init__(self, model: nn.Module, name: str, count: int, interval: int, seed: int) -> None:
        self._count, self._interval, self._seed, self._period = count, interval, seed, -1
        with errors.doing(f"drawing {count} layers of {name} (lisa_n_layers, lisa_layers_attribute)"):
            self._layers = list(model.get_submodule(name))
            self.draw(0)

    def draw(self, period: int) -> np.ndarray:
        """The layers of a period, which determines them, so that a resumed run trains the same."""
        return np.random.default_rng([self._seed, period]).choice(len(self._layers), self._count, replace=False)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        period = state.global_step // self._interval
        chosen, is_new = self.draw(period), period != self._period
        self._period = period
        for number, layer in enumerate(self._layers if is_new else ()):
            layer.requires_grad_(number in chosen)
            for weight in [] if number in chosen else layer.parameters():
                weight.grad = None
                kwargs["optimizer"].state.pop(weight, None)
