"""EBFTTrainer: structured energy-based fine-tuning, whole completions rewarded by feature matching.

A thin TRL GRPOTrainer: its first reward is `FeatureMatchingReward`, its loss has the cross-entropy on the reference
beside the policy gradient, and its evaluation measures feature matching in one fixed space.

B  completions   P  prompt tokens (padded left)   R  reference tokens (padded right)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer
from trl.trainer.utils import pad

from ebft.config.options import RewardOptions
from ebft.data.conversation import Conversation
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.trainable import load
from ebft.monitor.metrics import MeanMetrics
from ebft.rewards import alignment_rewards, cfm_loss, diversity_rewards, unbiased_cfm_loss, whiten
from ebft.structured.config import AsyncEBFTConfig, EBFTConfig
from ebft.structured.grpo import RolloutGRPOTrainer, Row
from ebft.structured.preflight import check_arguments, check_rows
from ebft.structured.references import labelled_reference
from ebft.structured.reward import FeatureMatch, FeatureMatchingReward


class EBFTTrainer(RolloutGRPOTrainer):
    """Fine-tune a causal LM by structured EBFT (Jelassi et al. 2026, section 2).

    Rows hold `prompt` (text or messages) and `ground_truth` (text), and may hold `remaining_turns` (messages) and
    columns for `reward_funcs`, which add to the feature-matching reward. `args.reward_weights` are those of the
    feature-matching reward and of `reward_funcs`, in this order. The feature network is `model` with its adapter
    disabled, or a frozen copy made here. With `args.ce_coef` the loss adds the mean negative log-likelihood of the
    references' tokens, their ends of turn included, at temperature 1.
    """

    args: EBFTConfig
    config_class = EBFTConfig

    def __init__(
        self,
        model: Any,
        args: EBFTConfig | None = None,
        *,
        reward_funcs: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else self.config_class()
        check_arguments(args, self.config_class, kwargs)
        for name in ("train_dataset", "eval_dataset"):
            check_rows(name, kwargs.get(name), args, ("prompt", "ground_truth"))
        model = load(model, peft_config, args.seed)
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(unwrap_adapter(model).config._name_or_path)
        self.feature_reward = FeatureMatchingReward(
            model,
            processing_class,
            args.num_generations,
            chat_template_kwargs=args.chat_template_kwargs,
            stop_token_ids=(args.generation_kwargs or {}).get("stop_token_ids", ()),
            **{name: getattr(args, name) for name in RewardOptions.model_fields},
        )
        others = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self._reference_nll = {"train": MeanMetrics(), "eval": MeanMetrics()}
        super().__init__(model, [self.feature_reward, *others], args, processing_class=processing_class, **kwargs)

    # Evaluation

    def _calculate_rewards(self, inputs: list[Row], *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, *args)
        if not self.model.training:
            for name in [name for name in self._pending_metrics if name.startswith("ebft/")]:
                del self._pending_metrics[name]  # in the reward's space; held-out metrics have a space of their own
            for name, value in held_out_metrics(self.feature_reward.last).items():
                self._pending_metrics[name].append(value)
        return rewards

    # Cross-entropy

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._measures_cross_entropy():
            output |= self._references(inputs)
        return output

    def _measures_cross_entropy(self) -> bool:
        return self.args.ce_coef > 0 or not self.model.training

    def _references(self, rows: list[Row]) -> dict[str, Tensor]:
        """References (B, R) and the mask of their tokens that count; each group's stands once, beside its first sample.

        `reference_tokens` counts them over the whole generation batch of all processes.
        """
        conversations = self.conversations(rows)
        ids, masks = [], []
        for index, (row, conversation) in enumerate(zip(rows, conversations)):
            tokens, counts = self._labelled(row, conversation)
            ids.append(torch.tensor(tokens))
            masks.append(torch.tensor(counts) * (index % self._group_size() == 0))
        mask = pad(masks).to(self.args.device)
        return {
            "reference_ids": pad(ids, self.processing_class.pad_token_id).to(self.args.device),
            "reference_mask": mask,
            "reference_tokens": self.accelerator.reduce(mask.sum(), "sum"),
        }

    def _labelled(self, row: Row, conversation: Conversation) -> tuple[list[int], list[int]]:
        return labelled_reference(conversation, self.renderer, row["prompt"], mask_thinking=self.args.mask_thinking_ce)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        if "reference_ids" not in inputs:
            return loss
        mode = "train" if self.model.training else "eval"
        nll = self._reference_nll_sum(model, inputs)
        self._reference_nll[mode].add("ce_loss", nll.detach(), inputs["reference_mask"].sum())
        if mode == "eval" or self.args.ce_coef == 0:
            return loss
        # The generation batch is spread over several optimizer steps, or is one; DDP averages over the processes.
        steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        tokens = inputs["reference_tokens"].clamp_min(1) / steps / self.accelerator.num_processes
        return loss + self.args.ce_coef * nll / tokens

    def _reference_nll_sum(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Summed negative log-likelihood of the references' counted tokens behind their prompts."""
        rows = inputs["reference_mask"].any(-1)
        if not rows.any():
            if self.accelerator.num_processes == 1:
                return torch.zeros((), device=self.args.device)
            rows[0] = True  # processes must run the wrapped model equally often; nothing of this row counts
        reference, counted = inputs["reference_ids"][rows], inputs["reference_mask"][rows]
        tokens = torch.cat([inputs["prompt_ids"][rows], reference], dim=1)
        # Padding behind a reference is masked by causality already; zeros there keep it out of the positions too.
        behind = counted.flip(-1).cummax(-1).values.flip(-1)
        attention_mask = torch.cat([inputs["prompt_mask"][rows], behind], dim=1)
        length = reference.shape[1]
        with self.accelerator.autocast():
            logits = model(
                input_ids=tokens, attention_mask=attention_mask, logits_to_keep=length + 1, use_cache=False
            ).logits[:, -length - 1 : -1]
        nll = F.cross_entropy(logits.flatten(0, 1).float(), reference.flatten(), reduction="none")
        return (nll * counted.flatten()).sum()

    def _signal_besides(self, inputs: dict[str, Any]) -> float:
        has_references = "reference_mask" in inputs and self.args.ce_coef > 0 and inputs["reference_mask"].any()
        return super()._signal_besides(inputs) + float(has_references)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        training = self.model.training
        means = self._reference_nll["train" if training else "eval"].drain(self.accelerator)
        if "ce_loss" in means and training:
            logs["ebft/ce_loss"] = means["ce_loss"]
        elif "ce_loss" in means:
            logs |= {"eval_ce_loss": means["ce_loss"], "eval_perplexity": math.exp(min(means["ce_loss"], 700.0))}
        super().log(logs, start_time)


class AsyncEBFTTrainer(EBFTTrainer):
    """EBFTTrainer whose rollouts are made ahead by a vLLM server, while the batch before trains."""

    args: AsyncEBFTConfig
    config_class = AsyncEBFTConfig


def held_out_metrics(match: FeatureMatch) -> dict[str, float]:
    """Feature matching in the one space that models compare in: normalised and unwhitened, as in strided mode."""
    phi, phi_ref = match.samples, match.reference
    values = {
        "alignment": alignment_rewards(phi, phi_ref),
        "diversity": diversity_rewards(phi),
        "cfm_loss_plugin": cfm_loss(phi, phi_ref),
        "cfm_loss_whitened": cfm_loss(*whiten(phi, phi_ref)),
    }
    if phi.shape[1] > 1:
        values["cfm_loss"] = unbiased_cfm_loss(phi, phi_ref)
    return {name: value.mean().item() for name, value in values.items()}
