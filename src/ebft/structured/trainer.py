"""EBFTTrainer: structured energy-based fine-tuning, with full completions rewarded by feature matching.

A TRL GRPOTrainer whose first reward is `FeatureMatchingReward`, whose loss adds the cross-entropy on the references to
the policy gradient, and whose evaluation measures feature matching in a fixed feature space.

B  completions   P  prompt tokens (padded left)   R  reference tokens (padded right)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trl.trainer.utils import pad

from ebft import errors, machine, scores
from ebft.data.conversation import Conversation
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.pretrained import pretrained_tokenizer
from ebft.monitor.metrics import HeldOutMeans, MeanMetrics
from ebft.prefix.forward import last_logits
from ebft.rewards import compute_advantages
from ebft.structured import grpo, scoring
from ebft.structured.config import AsyncEBFTConfig, EBFTConfig, RolloutGRPOConfig
from ebft.structured.generation import Row
from ebft.structured.reward import FeatureMatchingReward, held_out_values, reward_of
from ebft.structured.rollouts.turns import ReferenceLimit

SCALE_EPS = 1e-4  # added to the standard deviation of rewards, as in TRL
HELD_OUT = ("features", "cross-entropy", "all tokens")  # held-out means with different weights


class EBFTTrainer(grpo.RolloutGRPOTrainer):
    """Trainer for structured EBFT of a causal LM (Jelassi et al. 2026, section 2).

    Rows contain `prompt` (text or messages) and `ground_truth` or `completion` (text), whose length limits completions
    (`adaptive_max_tokens`), and optionally `remaining_turns` (messages) and columns for `reward_funcs`, which are added
    to the feature-matching reward. `args.reward_weights` are the weights of the feature-matching reward and of
    `reward_funcs`, in this order. The feature network is `model` with its adapter disabled, or else a frozen copy
    created here, or else `feature_network`, a causal LM with the tokens of `model`. With `args.ce_coef`, the loss
    includes the mean negative log-likelihood of the references' tokens, including end-of-turn tokens, at temperature 1.
    Advantages follow `args.advantage_estimator`; TRL computes `group_norm`.
    """

    args: EBFTConfig
    config_class: type[RolloutGRPOConfig] = EBFTConfig
    _tokens_of_step: Tensor

    def __init__(
        self,
        model: Any,
        args: EBFTConfig | None = None,
        *,
        reward_funcs: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        feature_network: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else self.config_class()
        others = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if not (others or args.alignment_coef or args.diversity_coef or args.ce_coef or args.beta):
            raise errors.ConfigError(
                "alignment_coef: 0 with diversity_coef: 0 and ce_coef: 0: the loss is always 0, so nothing is trained. "
                "Set one above 0, or add reward_funcs."
            )
        model = self.load_policy(model, peft_config, args, kwargs.pop("quantization_config", None))
        if processing_class is None:
            name, is_trusted = unwrap_adapter(model).config.name_or_path, args.trust_remote_code
            processing_class = pretrained_tokenizer(name, trust_remote_code=is_trusted)
        if kwargs.get("reward_processing_classes") is not None:  # of `reward_funcs`, as in TRL
            given = kwargs["reward_processing_classes"]
            kwargs["reward_processing_classes"] = [None, *(given if isinstance(given, list) else [given])]
        self.feature_reward: FeatureMatchingReward = reward_of(model, processing_class, args, args, feature_network)
        limit = ReferenceLimit(args.gt_length_multiplier, args.gt_length_floor) if args.adaptive_max_tokens else None
        self._reference_nll = MeanMetrics()
        self._held_out: dict[str, HeldOutMeans] = {}
        super().__init__(
            model,
            [self.feature_reward, *others],
            args,
            processing_class=processing_class,
            reference_limit=limit,
            **kwargs,
        )

    def add_to_inputs(self, rows: list[Row], inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super().add_to_inputs(rows, inputs)
        if self.model.training and self.args.advantage_estimator != "group_norm":
            inputs = inputs | {"advantages": self._advantages(rows)}
        return inputs | self._references(rows) if self.args.ce_coef > 0 or not self.model.training else inputs

    def _advantages(self, rows: list[Row]) -> Tensor:
        """Return the advantages (B,) of this process's completions by `args.advantage_estimator`."""
        args = self.args
        weights = self.reward_weights.to(self.rewards, non_blocking=True)
        rewards = (self.rewards * weights).nansum(-1).view(-1, self.num_generations)  # None counts as 0, as in TRL
        diversity = weights[0] * args.diversity_coef * self.feature_reward.last.diversity.to(rewards)
        advantages = compute_advantages(
            rewards,
            args.advantage_estimator,
            diversity=self.accelerator.gather(diversity),
            rloo_baseline=args.rloo_baseline,
        )
        if self.scale_rewards != "none":
            std = rewards.std() if self.scale_rewards == "batch" else rewards.std(-1, keepdim=True)
            advantages = advantages / (std + SCALE_EPS)
        self.log_advantages(advantages.flatten())
        return grpo.of_this_process(self.accelerator, advantages.flatten(), rows)

    def _terms(self) -> dict[str, Tensor]:
        match = self.feature_reward.last
        return {"alignment": match.alignment.flatten(), "diversity": match.diversity.flatten()}

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        self._held_out = {name: HeldOutMeans(self.accelerator, rows=None) for name in HELD_OUT}
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def after_rewards(self, rows: list[Row], rewards: Tensor) -> Tensor:
        rewards = super().after_rewards(rows, rewards)
        if not self.model.training:
            self.drop_reward_logs("ebft/")  # the reward may be whitened; held-out metrics use a fixed feature space
            reward = self.feature_reward
            values = held_out_values(reward.last, reward.options, reward.network.computed_in)
            self._held_out["features"].add(values, torch.full((len(rows),), 1 / self.held_out_rows.copies))
        return rewards

    def _references(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return the references (B, R), a mask of the tokens in the cross-entropy, of a group's first, and its sum."""
        conversations = self.generation.conversations(rows)
        ids, masks = [], []
        for index, conversation in enumerate(conversations):
            tokens, counts = self._labelled(conversation)
            ids.append(torch.tensor(tokens, dtype=torch.long))
            masks.append(torch.tensor(counts, dtype=torch.long) * (index % self._group_size() == 0))
        padded = pad(ids, self.processing_class.pad_token_id), pad(masks)
        ids, mask = machine.copy_to(self.args.device, *padded)
        return {
            "reference_ids": ids,
            "reference_mask": mask,
            "reference_tokens": self.accelerator.reduce(mask.sum(), "sum"),
        }

    def _labelled(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        if not self.generation.samples_conversations and conversation.generation_prompt_ids != conversation.prompt_ids:
            raise errors.DataError(
                "the generation prompt of the chat template opens a block that the reference lacks. Set vllm_mode: "
                "managed, or chat_template_kwargs such that both agree (such as enable_thinking: false)"
            )
        return labelled_reference(conversation, mask_thinking=self.args.mask_thinking_ce)

    def add_to_loss(self, model: nn.Module, inputs: dict[str, Any], loss: Tensor) -> Tensor:
        if "reference_ids" not in inputs:
            return loss
        (nll, counts), (nll_all, counts_all) = self._nll_sums(model, inputs)
        if not self.model.training:
            copies = self.held_out_rows.copies
            of_row, of_all = nll / counts.clamp_min(1), nll_all / counts_all.clamp_min(1)
            self._held_out["cross-entropy"].add({"ce_loss": of_row}, counts / copies)
            self._held_out["all tokens"].add({"ce_loss_all": of_all}, counts_all / copies)
            return loss
        self._reference_nll.add("ce_loss", nll.detach().sum(), counts.sum())
        # DDP averages over the processes, whereas these losses are to be summed.
        tokens = self._reference_tokens(inputs).clamp_min(1) / self.accelerator.num_processes
        return loss + self.args.ce_coef * nll.sum() / tokens

    def _reference_tokens(self, inputs: dict[str, Any]) -> Tensor:
        """Return the number of reference tokens in the cross-entropy of this optimizer step, over all processes."""
        per_generation, per_step = self.args.steps_per_generation, self.current_gradient_accumulation_steps
        if per_generation % per_step:  # not all batches of this step are generated yet
            return self._tokens_of_step
        first = self.trained_micro_batches % per_generation // per_step * per_step
        of_this_step = self.generation_batch[first : first + per_step]
        counts = sum(batch["reference_mask"].sum() for batch in of_this_step)
        return self.accelerator.reduce(counts, "sum")

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Also count the reference tokens of a step that samples later, a part of a generation batch in proportion."""
        count, per_generation = len(batch_samples), self.args.steps_per_generation
        if self.args.ce_coef > 0 and count and per_generation % count:
            every = per_generation * self.num_iterations
            begun = min(-self.trained_micro_batches % every, count) if self.generation_batch else 0
            total = torch.zeros((), device=self.args.device)
            for first in range(begun, count, every):
                groups = self.generation.conversations(batch_samples[first][:: self.num_generations])
                total += sum(sum(self._labelled(group)[1]) for group in groups) * min(every, count - first)
            total = self.accelerator.reduce(total, "sum")
            total += self.generation_batch[0]["reference_tokens"] * begun if begun else 0
            self._tokens_of_step = total / per_generation
        return super()._get_num_items_in_batch(batch_samples, device)

    def _nll_sums(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return two pairs (summed negative log-likelihood, number of tokens), each (B,) and 0 without a reference. The
        first pair is over the reference tokens in the cross-entropy, the second over all predicted tokens; only in
        evaluation does the latter include the prompt."""
        shared = self.scorer.take_references()
        if shared is not None:
            return _sums_of_shared(*shared, inputs)
        rows = inputs["reference_mask"].any(-1)
        zeros = torch.zeros(len(rows), device=self.args.device)
        if not rows.any():
            if self.accelerator.num_processes == 1:
                return (zeros, zeros), (zeros, zeros)
            rows[0] = True  # all processes must call the wrapped model equally often; this row is masked out
        reference, counted = inputs["reference_ids"][rows], inputs["reference_mask"][rows]
        tokens = torch.cat([inputs["prompt_ids"][rows], reference], dim=1)
        # The causal mask already excludes padding after a reference; zeros also exclude it from the positions.
        after = scoring.up_to_last(counted)
        attention_mask = torch.cat([inputs["prompt_mask"][rows], after], dim=1)
        kept = reference.shape[1] + 1 if self.model.training else tokens.shape[1]
        with self.accelerator.autocast():
            logits = last_logits(model, tokens, attention_mask, kept)[:, :-1]
        nll = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1 - kept :], reduction="none")
        predicted = attention_mask[:, 1 - kept :] * attention_mask[:, -kept:-1] * after.any(-1, keepdim=True)
        nll_of_reference = (nll[:, -reference.shape[1] :] * counted).sum(-1)
        sums = [nll_of_reference, counted.sum(-1), (nll * predicted).sum(-1), predicted.sum(-1)]
        own, own_count, all_tokens, all_count = (zeros.masked_scatter(rows, value.to(zeros)) for value in sums)
        return (own, own_count), (all_tokens, all_count)

    def _signal_besides(self, inputs: dict[str, Any]) -> Tensor | float:
        has_references = "reference_mask" in inputs and self.args.ce_coef > 0
        return super()._signal_besides(inputs) + (inputs["reference_mask"].sum() if has_references else 0.0)

    def own_metrics(self) -> dict[str, float]:
        if self.model.training:
            return {f"ebft/{name}": mean for name, mean in self._reference_nll.drain(self.accelerator).items()}
        means = {name: mean for part in self._held_out.values() for name, mean in part.means().items()}
        self._held_out = {}
        means |= scores.perplexities(means)
        return {f"{self.held_out_completions.prefix}_{name}": mean for name, mean in means.items()}

    def running_state(self) -> dict[str, Any]:
        return super().running_state() | {"reference_nll": self._reference_nll.state()}

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self._reference_nll.restore(state.get("reference_nll", {}))


def _sums_of_shared(
    logps: Tensor, of_prompts: Tensor | None, inputs: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return `EBFTTrainer._nll_sums` from log-probabilities (B, R) of references and their sums (B,) over prompts."""
    counted = inputs["reference_mask"]
    has_reference = counted.any(-1)
    nll_all, count_all = -logps.sum(-1), scoring.up_to_last(counted).sum(-1)
    if of_prompts is not None:
        nll_all = nll_all - of_prompts * has_reference
        count_all = count_all + (inputs["prompt_mask"].sum(-1) - 1) * has_reference
    return (-(logps * counted).sum(-1), counted.sum(-1)), (nll_all, count_all)


class AsyncEBFTTrainer(EBFTTrainer):
    """EBFTTrainer with prefetched rollouts: a vLLM server generates them while the previous batch trains."""

    args: AsyncEBFTConfig
    config_class: type[RolloutGRPOConfig] = AsyncEBFTConfig


def labelled_reference(conversation: Conversation, *, mask_thinking: bool) -> tuple[list[int], list[int]]:
    """Return the ids of the reference after the prompt, each reply with its end token, and their mask (0 or 1).

    The mask is 1 for replies and their end tokens, and 0 for the turns between them and, with `mask_thinking`, for
    thinking blocks.
    """
    ids: list[int] = []
    counts: list[int] = []
    for number, turn in enumerate(conversation.turns):
        if number:  # the tokens before a reply start with the end of the previous reply
            ids += turn.lead_ids
            counts += [int(index < turn.ended) for index in range(len(turn.lead_ids))]
        ids += turn.reference_ids
        thinking = [False] * len(turn.reference_ids)
        if mask_thinking:
            with errors.doing("finding the tokens of thinking (ebft.mask_thinking_ce), which needs a fast tokenizer"):
                thinking = list(turn.thinking)
        counts += [int(not inside) for inside in thinking]
    end = conversation.end_id
    return (ids, counts) if end is None else ([*ids, end], [*counts, 1])
