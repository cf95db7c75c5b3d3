"""StridedEBFTTrainer: a transformers Trainer with the loss of strided energy-based fine-tuning.

`compute_loss` implements the algorithm, top to bottom. Tensors in this file are (M blocks of all documents,
N rollouts, G tokens); `StridedOutput` returns (B documents, N, NB blocks of the longest document, G).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import TrainerControl, TrainingArguments

from ebft.anchors import BlockOptions
from ebft.config import rules
from ebft.config.options import RolloutLogOption, StridedOptions
from ebft.config.rules import resolve_single_sample, select_by_cfm_loss, validate_options
from ebft.config.section import with_prefix
from ebft.data.documents import DocumentCollator
from ebft.data.rendering import ChatTemplate
from ebft.features import FeatureNetwork
from ebft.machine import copy_to
from ebft.models.causal_lm import end_token_ids, evaluating, positions_of, unknown_ids, unwrap_adapter
from ebft.models.pretrained import check_adapter, disable_dropout, find_model, load, pretrained_tokenizer
from ebft.models.sharding import check_version, check_whole, is_sharded, keep_output_dtype
from ebft.monitor.metrics import HeldOutRows, Throughput
from ebft.monitor.run_files import ScoredRollouts
from ebft.prefix.forward import ATTENTION, prepare, way_of
from ebft.prefix.sampling import Truncation
from ebft.rewards import FeatureMatch, compute_advantages, first_equal, match_features
from ebft.strided.held_out import held_out_metrics
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.loss import TermGradients, cross_entropy_loss, embed_blocks, policy_gradient_loss, score
from ebft.strided.output import StepMetrics, StridedOutput
from ebft.strided.rollout import DocumentNoise, Rollouts, sample_rollouts
from ebft.strided.validation import check_grad_norms, check_parity, check_trainer_arguments, tokenised_rows, usable_rows
from ebft.trainer import OverTrainer
from ebft.transformers_internals import rename_checkpointing

# Keys of a batch: its Documents, parsed if the tokens of a step were counted, and Rollouts sampled ahead of its loss.
_PARSED, _SAMPLED = "documents", "rollouts"


@with_prefix
@dataclass
class StridedEBFTConfig(StridedOptions, RolloutLogOption, TrainingArguments):
    """TrainingArguments with the options of strided EBFT, which are declared in `ebft.config.options`."""

    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate; as in a config."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between logs, or a share of all; 10 as in TRL."})
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens at which rows are or were cut (sequence_len in a config). Texts that reach it "
            "have no blocks in their last generate_max_len tokens. If unset, the model's max_position_embeddings."
        },
    )
    dataloader_pin_memory: bool | None = field(
        default=None,
        metadata={"help": "Pin the memory of batches for faster copies to a GPU. If unset, true if there is one."},
    )

    def __post_init__(self):
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = torch.cuda.is_available()
        rename_checkpointing(self)
        select_by_cfm_loss(self)
        super().__post_init__()
        validate_options(StridedOptions, self)
        validate_options(RolloutLogOption, self)
        rules.refuse(rules.logged_rollouts(self.log_rollouts, self.log_completions, rules.in_python))
        # The collator's columns are read by name and need not be arguments of the model's forward.
        self.remove_unused_columns = False


class StridedEBFTTrainer(OverTrainer):
    """Trainer for strided EBFT of a causal LM (Jelassi et al. 2026, section 2 and appendix F).

    Rows of `train_dataset` contain `text`, `messages`, or `prompt` and `completion`, as for TRL's trainers, or else
    `input_ids` and optionally `labels`, `prompt_length` and `turn_spans`; the default collator pads them. The
    feature network is the model with its adapter disabled, or else a frozen copy created here (on
    `args.feature_device`), or else `feature_network`, a causal LM with the tokens of `model`. The loss is
    normalised by the number of tokens of the whole optimizer step, over all micro-batches and ranks. `model` is a
    causal LM, with or without a PEFT adapter, or a name to load; `peft_config` adds a new adapter to it. Raises
    ModelError for architectures that strided EBFT does not support. `scored_rollouts.hooks` are called in each
    training step with its rollouts and their rewards (B, N, NB).
    """

    args: StridedEBFTConfig
    control: TrainerControl

    def __init__(
        self,
        model: Any = None,
        args: StridedEBFTConfig | None = None,
        train_dataset: Any = None,
        *,
        data_collator: Any = None,
        peft_config: Any = None,
        feature_network: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else StridedEBFTConfig()
        check_trainer_arguments(args, kwargs)
        resolve_single_sample(args)
        is_tokenised = "input_ids" in (getattr(train_dataset, "column_names", None) or ["input_ids"])
        if isinstance(model, str) and not is_tokenised and kwargs.get("processing_class") is None:
            kwargs["processing_class"] = pretrained_tokenizer(find_model(model, "model"))
        model = load(model, peft_config, args.seed)
        check_whole(model)
        check_adapter(model)
        #: Where the blocks of documents are, and what is sampled at each.
        tokenizer = kwargs.get("processing_class")
        known = () if tokenizer is None else ChatTemplate(tokenizer).end_ids
        blocks = BlockOptions.of(args, end_token_ids(model, known), args.max_length).within(positions_of(model))
        blocks = blocks.within(getattr(unwrap_adapter(model).config.get_text_config(), "index_topk", None))
        blocks = blocks if tokenizer is None else replace(blocks, vocabulary=unknown_ids(model, tokenizer).start)
        self.block_options: BlockOptions = blocks
        kwargs |= {} if train_dataset is None else {"train_dataset": train_dataset}
        for name in kwargs.keys() & {"train_dataset", "eval_dataset"}:
            kwargs[name] = tokenised_rows(name, kwargs[name], tokenizer, args, positions_of(model))
            kwargs[name] = usable_rows(name, kwargs[name], model, self.block_options)
        options = args.feature_layers, args.embed_method, args.feature_device
        self.feature_network: FeatureNetwork = FeatureNetwork(model, *options, network=feature_network)
        if data_collator is None:  # padding affects no result
            pad = (tokenizer or model.config.get_text_config()).pad_token_id
            data_collator = DocumentCollator(pad if isinstance(pad, int) and pad >= 0 else 0)
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)
        check_grad_norms(args, FSDP=self.is_fsdp_enabled, DeepSpeed=self.is_deepspeed_enabled)
        check_version(self.accelerator)
        keep_output_dtype(self.accelerator)
        self._causal_lm = prepare(model, may_run_rows=True)
        if args.disable_dropout:
            disable_dropout(model)
        check_parity(self._causal_lm, self.feature_network, as_trained=args.disable_dropout)
        if args.gradient_checkpointing:
            self._causal_lm.enable_input_require_grads()  # reentrant checkpoints need inputs that require a gradient
        self.model_accepts_loss_kwargs = True  # the loss is normalised over the step, see _get_num_items_in_batch
        self._noise = DocumentNoise(args.seed)
        self._metrics = StepMetrics()
        self._throughput = Throughput(self.budget)
        self._term_gradients = TermGradients(self.model.parameters())
        self.scored_rollouts: ScoredRollouts = ScoredRollouts(self)
        self._held_out_rows = HeldOutRows(self)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, StridedOutput]:
        """Compute the loss of one strided EBFT step on `input_ids` (rows, S) and the other inputs of the collator.

        `Documents.from_inputs` documents the supported inputs. Sampling noise depends on the step and the document; a
        document that occurs again within a training step gets different rollouts. `num_items_in_batch` is the result of
        `_get_num_items_in_batch`: the numbers of generated tokens and cross-entropy tokens of the optimizer step.
        None, as in a call from outside a training step, normalises by this batch alone and logs nothing.
        """
        args = self.args
        documents = inputs.get(_PARSED) or Documents.from_inputs(inputs, args.device)
        layout = StridedLayout.place(documents, self.block_options)
        rollouts = inputs.get(_SAMPLED)
        single_pass = rollouts is None and self._trains_on_the_sampling_pass()

        # A call from outside a training step must not change what training samples and logs.
        is_training_step = num_items_in_batch is not None
        noise = self._noise if is_training_step else DocumentNoise(args.seed)
        if rollouts is None:
            rollouts = self._sample(model, documents, layout, noise, single_pass)
        phi, phi_ref = self._embed(documents, layout, rollouts.tokens)
        match = self._match(phi, phi_ref, rollouts.tokens)
        advantages = compute_advantages(
            match.rewards,
            args.advantage_estimator,
            diversity=args.diversity_coef * match.diversity,
            rloo_baseline=args.rloo_baseline,
        )

        # In a single pass, sampling recorded what these log-probabilities need for backward (prefix/cpu.py).
        logps, text_logps = rollouts.logps, rollouts.text_logps
        if not single_pass:
            logps, text_logps = self._score(model, documents, layout, rollouts.tokens)
        generated = layout.lengths(rollouts.tokens).sum()
        sampled_ahead = _SAMPLED in inputs
        generated_tokens, reference_tokens = self._token_counts(documents, generated, sampled_ahead, num_items_in_batch)
        rl_loss = policy_gradient_loss(advantages, logps, generated_tokens)
        ce_loss = cross_entropy_loss(text_logps, reference_tokens)
        loss = args.rl_coef * rl_loss + args.ce_coef * ce_loss

        output = StridedOutput.of(documents, layout, rollouts.tokens, logps, match, advantages, rl_loss, ce_loss, loss)
        if is_training_step:
            self._metrics.record(output, rollouts.entropy, text_logps, documents, layout)
            self.budget.add(documents=len(documents.lengths), generated_tokens=output.lengths.sum())
            entries = partial(output.rows, documents, self.state.global_step + 1, self.processing_class)
            self.scored_rollouts(entries, output.rewards)
            if self._measures_gradients():
                with self.budget.meter.counting(False):
                    self._term_gradients.add(rl=args.rl_coef * rl_loss, ce=args.ce_coef * ce_loss)
            # DDP averages over ranks, whereas these losses are to be summed; output.loss remains this rank's share.
            loss = loss * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def _sample(
        self, model: nn.Module, documents: Documents, layout: StridedLayout, noise: DocumentNoise, single_pass: bool
    ) -> Rollouts:
        """Sample rollouts at every anchor; with `single_pass`, their log-probabilities have gradients."""
        with nullcontext() if single_pass else evaluating(model), self.accelerator.autocast():
            return sample_rollouts(
                model if single_pass else self._sampling_policy(model),
                documents,
                layout,
                temperature=self.args.temperature,
                truncation=self._truncation(),
                noise=noise.draw(documents, layout, self.state.global_step),
                text_gradient=self.args.ce_coef > 0 if single_pass else None,
                tokens_per_pass=self.args.rollout_tokens_per_pass,
            )

    def _embed(self, documents: Documents, layout: StridedLayout, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the feature network's embeddings of the rollouts and of their reference blocks."""
        with torch.no_grad(), self.accelerator.autocast():
            return embed_blocks(
                self.feature_network, documents, layout, tokens, tokens_per_pass=self.args.rollout_tokens_per_pass
            )

    def _match(self, phi: Tensor, phi_ref: Tensor, tokens: Tensor) -> FeatureMatch:
        """Return the rewards of the rollouts, equal for equal ones, and their terms."""
        computed_in = self.feature_network.computed_in
        return match_features(phi, phi_ref, self.args, computed_in=computed_in, first=first_equal(tokens))

    def _score(
        self, model: nn.Module, documents: Documents, layout: StridedLayout, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the rollouts and of the text, from a separate forward pass."""
        with self.accelerator.autocast():  # which the model itself applies only after train() has prepared it
            return score(
                model,
                documents,
                layout,
                tokens,
                temperature=self.args.temperature or 1.0,  # greedy rollouts (evaluation) are scored at temperature 1
                truncation=self._truncation(),
                text_gradient=self.args.ce_coef > 0,
                apply_dropout=not self.args.disable_dropout,
                tokens_per_pass=self.args.rollout_tokens_per_pass,
            )

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        loader.device = None  # of accelerate: documents are parsed, and their layout made, before a batch is copied
        return loader

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors of a batch to the device, for subclasses; the step uses its documents."""
        copied = {name: x.to(self.args.device, non_blocking=True) for name, x in inputs.items() if torch.is_tensor(x)}
        return {**inputs, **copied}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._measures_gradients() and self.accelerator.sync_gradients:
            for term, norm in self._term_gradients.drain(self.accelerator).items():
                self._metrics.add(f"ebft/{term}_grad_norm", norm, 1)
        return loss

    def add_seconds(self, seconds: float) -> None:
        self._throughput.add(seconds)

    def running_state(self) -> dict[str, Any]:
        return super().running_state() | {"metrics": self._metrics.state()}

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self._metrics.restore(state.get("metrics", {}))

    def computing_models(self) -> list[nn.Module]:
        return [self.model, self.feature_network.causal_lm]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        rules.refuse(rules.untrainable(self.args))
        return super().train(*args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the policy on held-out documents, in the fixed feature space of held_out.py."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset  # its name, as in transformers
        if isinstance(dataset, dict):
            is_own = dataset is self.eval_dataset  # whose rows are checked
            parts = {f"{metric_key_prefix}_{name}": name if is_own else part for name, part in dataset.items()}
            return {k: v for prefix, part in parts.items() for k, v in self.evaluate(part, None, prefix).items()}
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            known = self.processing_class, self.args, positions_of(self.model)
            dataset = tokenised_rows("eval_dataset", dataset, *known)
            dataset = usable_rows("eval_dataset", dataset, self.model, self.block_options)
        self.use_result()
        batches = self.callback_handler.eval_dataloader = self._held_out_batches(dataset)

        def with_progress() -> Iterator[Any]:  # after each, callbacks such as the progress bar, as in Trainer
            for inputs in batches:
                self._held_out_rows.begin_batch()
                yield inputs
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        metrics = held_out_metrics(
            self._sampling_policy(self.model_wrapped),
            self.feature_network,
            with_progress(),
            block_options=self.block_options,
            seed=self.args.seed,
            tokens_per_pass=self.args.rollout_tokens_per_pass,
            alignment_coef=self.args.alignment_coef,
            diversity_coef=self.args.diversity_coef,
            accelerator=self.accelerator,
            copies=lambda: self._held_out_rows.copies,
        )
        logs = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(logs)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    def _held_out_batches(self, dataset: Any) -> Any:
        """Return this rank's share of the held-out rows, each row exactly once.

        With FSDP, where all ranks must run the same number of batches, all evaluate the last rows together; so they do
        for streaming datasets.
        """
        if is_sharded(self.model) or not hasattr(dataset, "__len__"):
            return self._held_out_rows.loader(dataset, self.get_eval_dataloader)
        share = Subset(dataset, range(self.args.process_index, len(dataset), self.args.world_size))
        return DataLoader(share, batch_size=self.args.eval_batch_size, collate_fn=self.data_collator)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the EBFT metrics and the throughput since the last call added."""
        if "loss" in logs:  # excludes the logs of evaluations
            logs = {**logs, **self._metrics.drain(self.accelerator), **self._throughput.drain(self.accelerator)}
        super().log(logs, start_time)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """Return the numbers of generated and of cross-entropy tokens of the optimizer step, over all ranks: (2,).
        Rollouts end where their texts do, so the first number is known once all micro-batches are sampled. With a
        single micro-batch it is 0, and `compute_loss` counts them."""
        counts = torch.zeros(2, dtype=torch.long, device=device if len(batch_samples) > 1 else None)
        for inputs in batch_samples:
            documents = inputs[_PARSED] = Documents.from_inputs(inputs, device)
            counts[1] += documents.ce_mask.sum().item()
            if len(batch_samples) > 1:
                layout = StridedLayout.place(documents, self.block_options)
                self.begin_seconds()
                with torch.no_grad(), self.budget.meter.counting():
                    inputs[_SAMPLED] = self._sample(self.model_wrapped, documents, layout, self._noise, False)
                counts[0] += layout.lengths(inputs[_SAMPLED].tokens).sum()
        return counts if self.args.world_size == 1 else self.accelerator.reduce(*copy_to(device, counts), "sum")

    def _token_counts(
        self, documents: Documents, generated: Tensor, sampled_ahead: bool, counts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the token counts that normalise the two losses, at least 1 to avoid division by zero. `generated` are
        the tokens of this batch, `counts` the result of `_get_num_items_in_batch`."""
        if counts is None:
            return generated, documents.ce_mask.sum().clamp_min(1)
        if sampled_ahead:
            generated = counts[0]
        elif self.args.world_size > 1:
            generated = self.accelerator.reduce(generated, "sum")
        return generated, counts[1].clamp_min(1)

    def _trains_on_the_sampling_pass(self) -> bool:
        """Whether the loss uses the computation of the sampling pass instead of a second forward pass. Both give equal
        results, since the weights are unchanged and there is no dropout. Not possible if the results of sampling must
        be discarded to save memory, or with FSDP, which gathers the weights again for each pass."""
        args = self.args
        saves_memory = args.gradient_checkpointing or args.rollout_tokens_per_pass is not None
        possible = args.disable_dropout and not saves_memory and not is_sharded(self.model)
        possible &= way_of(self._causal_lm) == ATTENTION
        wanted = args.single_pass if args.single_pass is not None else args.device.type == "cpu"
        return torch.is_grad_enabled() and possible and wanted

    def _measures_gradients(self) -> bool:
        """Whether the gradient norms of the loss terms are computed in the current optimizer step."""
        every = self.args.grad_norms_every
        return torch.is_grad_enabled() and every > 0 and (self.state.global_step + 1) % every == 0

    def _sampling_policy(self, model: nn.Module) -> nn.Module:
        """Return the model without its wrappers, or, with FSDP, the wrapped model, which gathers the weights."""
        return model if is_sharded(self.model) else self._causal_lm

    def _truncation(self) -> Truncation | None:
        """Return which tokens are sampled, and scored; greedy rollouts are scored among all."""
        return Truncation.of(None, self.args.top_p, None) if self.args.temperature else None
