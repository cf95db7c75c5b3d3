"""Scoring of completions in the loss: one forward pass in which prompts are shared, or TRL's padded rows."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.models.pretrained import rates_as_loaded
from ebft.prefix.attention.passes import HINT
from ebft.prefix.forward import last_logits, most_tokens, prepare
from ebft.prefix.parity import check_distant_tokens, compare, refusing
from ebft.prefix.sampling import Truncation
from ebft.structured.rollouts.local import Generator, SharedPromptSampler
from ebft.structured.rollouts.turns import Sampling
from ebft.structured.shared_prompt import Padded, Prompt, Rows, put_back, score_completions
from ebft.transformers_internals import override_attn_implementation


class SharedPromptScorer:
    """Scores the completions of a trainer with shared prompts; models that do not allow it are scored in TRL's rows.

    `shares_prompts`: whether prompts are shared. Raises ModelError for models that neither share prompts nor give exact
    results with padded rows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, args = trainer, trainer.args
        self.shares_prompts: bool = args.shared_prefix
        self.reference_logps: tuple[Tensor, Tensor | None] | None = None  # see `take_references`
        self._most_tokens: int | None = None
        self._has_warned = False
        causal_lm = unwrap_adapter(trainer.model)
        if self.shares_prompts:
            try:
                check_shared_prompt_parity(causal_lm, as_trained=args.disable_dropout)
                if trainer.ref_model is not None:
                    prepare(trainer.ref_model)
                self._most_tokens = most_tokens(causal_lm)
            except ModelError as error:
                self.shares_prompts = False
                cause = str(error).replace(HINT, "").strip().rstrip(".")
                message = f"Prompts are computed once per completion, because they cannot be shared: {cause}."
                warnings.warn(message, stacklevel=2)
        if not self.shares_prompts:
            samples = not (args.use_vllm or args.uses_server)
            check_padding(causal_lm, as_trained=args.disable_dropout, samples=samples)

    @property
    def scores_truncated(self) -> bool:
        """Whether completions are scored under the distribution that top-k, top-p and min-p leave, in every batch."""
        # TRL scores all tokens, as it does for the loss of experts and the rows that `_are_too_long`.
        return self.shares_prompts and self._most_tokens is None and not self._trainer.aux_loss_enabled

    def score(
        self, model: nn.Module, prompts: Padded, completions: Padded, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Score completions, and the references of the loss, in one forward pass that computes each prompt once.

        Returns log-probabilities and entropies, (B, C) each, or None if TRL has to compute them.
        """
        if not self.shares_prompts:
            return None
        trainer = self._trainer
        cut = trainer.args.top_k, trainer.args.top_p, trainer.args.min_p
        inputs = trainer.inputs_of_loss or {}
        references = (inputs["reference_ids"], inputs["reference_mask"]) if "reference_ids" in inputs else None
        rows = Rows.of(prompts, completions, references)
        if self._are_too_long(rows):
            return None
        scores = score_completions(
            model,
            rows.prompts,
            temperature=trainer.temperature,
            truncation=Truncation.of(*cut) if self.scores_truncated else None,
            with_entropies=with_entropies,
            entropy_gradient=trainer.has_entropy_bonus,
            score_prompts=references is not None and not trainer.model.training,
        )
        if references is not None:
            self.reference_logps = rows.references(scores, references[0])
        found = (put_back(x, rows.completion_index, completions[0]) for x in scores[:2] if x is not None)
        return tuple(found) if with_entropies else (*found, None)

    def take_references(self) -> tuple[Tensor, Tensor | None] | None:
        """Return `Rows.references` of the micro-batch that was scored for the loss; None if TRL has scored it."""
        found, self.reference_logps = self.reference_logps, None
        return found

    def _are_too_long(self, rows: Rows) -> bool:
        """Whether rotary frequencies depend on the length of a sequence, in the rows of any process."""
        if self._most_tokens is None:
            return False
        trainer, are_longer = self._trainer, rows.longest > self._most_tokens
        if trainer.accelerator.num_processes > 1:
            of_process = torch.tensor([float(are_longer)], device=trainer.args.device)
            are_longer = bool(trainer.accelerator.reduce(of_process, "sum").item())
        if not are_longer:
            return False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Prompts are computed once per completion for sequences of more than {self._most_tokens} tokens, "
                "because the model's rotary frequencies change at this length.",
                stacklevel=2,
            )
        return True


_PROMPT, _SUFFIXES, _SAMPLED = 8, (1, 4, 2), 3  # tokens


def check_shared_prompt_parity(causal_lm: PreTrainedModel, as_trained: bool = True) -> None:
    """Raise ModelError if shared prompts change log-probabilities on a short random prompt with three suffixes.

    Each suffix is continued by sampling and then scored, in training mode if `as_trained`. The plain model runs each
    sequence separately with eager attention. Does not change the state of the random number generators.
    """
    prepare(causal_lm)
    vocabulary, generator = causal_lm.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(0, vocabulary, (length,), generator=generator).tolist()
    prompt = draw(_PROMPT)
    suffixes = [draw(length) for length in _SUFFIXES]
    with refusing(causal_lm), torch.random.fork_rng():
        torch.manual_seed(0)
        with evaluating(causal_lm):
            sample = SharedPromptSampler(Sampling(temperature=1.0))
            sampled = sample(causal_lm, [prompt + ids for ids in suffixes], [_SAMPLED] * len(suffixes))
            completions = [ids + completion.ids for ids, completion in zip(suffixes, sampled)]
            with rates_as_loaded(causal_lm), override_attn_implementation(causal_lm, "eager"):
                expected = [_plain_logps(causal_lm, prompt, ids) for ids in completions]
            causal_lm.train(as_trained)
            tensors = [torch.tensor(ids, device=causal_lm.device) for ids in (prompt, *completions)]
            scores = score_completions(causal_lm, [Prompt(tensors[0], tensors[1:])], temperature=1.0)
            causal_lm.eval()
            check_distant_tokens(causal_lm)
        of_samples = torch.cat([logps[-_SAMPLED:] for logps in expected]).cpu()
        found = torch.tensor([logp for completion in sampled for logp in completion.logps])
        compare(causal_lm, "log-probabilities of samples with shared prompts", (found - of_samples).abs())
        compare(causal_lm, "log-probabilities with shared prompts", (scores.logps - torch.cat(expected)).abs())


def _plain_logps(causal_lm: PreTrainedModel, prompt: list[int], ids: list[int]) -> Tensor:
    """Return the log-probabilities of `ids` after the prompt from one forward pass of this sequence."""
    tokens = torch.tensor([prompt + ids], device=causal_lm.device)
    logps = causal_lm(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logps.gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1)


_PROMPTS, _COMPLETION = (13, 4), 6  # tokens
_ADVICE = (
    "Structured EBFT and GRPO, which pad shorter prompts on the left, cannot train this model; SFT, which pads on the "
    "right, can"
)
_CAUSE = f"Its layers do not skip padding. {_ADVICE}"


def check_padding(causal_lm: PreTrainedModel, as_trained: bool = True, samples: bool = True) -> None:
    """Raise ModelError if padding on the left changes the log-probabilities of a short random row.

    In training mode if `as_trained`, as the loss scores it; with `samples`, also as `generate` samples it, whose tokens
    must be the most probable ones. Does not change the state of the random number generators.
    """
    vocabulary, generator = causal_lm.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(0, vocabulary, (length,), generator=generator).tolist()
    longer, shorter = (draw(length + _COMPLETION) for length in _PROMPTS)
    with refusing(causal_lm, "padded rows", _ADVICE), torch.random.fork_rng(), evaluating(causal_lm):
        with rates_as_loaded(causal_lm):
            expected = _logps(causal_lm, [shorter])
        causal_lm.train(as_trained)
        found = _logps(causal_lm, [longer, shorter])
        causal_lm.eval()
        completion = torch.tensor(shorter[-_COMPLETION:], device=found.device)
        differences = (found - expected).gather(-1, completion[:, None]).abs()
        compare(causal_lm, "log-probabilities of a padded row", differences, _CAUSE)
        if samples:
            compare(causal_lm, "samples of a padded prompt", _surprise(causal_lm, longer, shorter), _CAUSE)


def _logps(causal_lm: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    """Return the log-probabilities (tokens, V) of the last row's completion, with rows padded on the left."""
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in rows], device=causal_lm.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=causal_lm.device)
    return last_logits(causal_lm, tokens, mask, _COMPLETION + 1)[-1, :-1].float().log_softmax(-1)


def _surprise(causal_lm: PreTrainedModel, longer: list[int], shorter: list[int]) -> Tensor:
    """Return by how much the most probable tokens are more probable than those sampled greedily in a padded batch."""
    prompts = [row[:length] for row, length in zip((longer, shorter), _PROMPTS)]
    greedy = Generator(Sampling(temperature=0.0), pad_token_id=0)
    sampled = greedy(causal_lm, prompts, [_COMPLETION] * len(prompts))[-1].ids
    logps = _logps(causal_lm, [prompts[-1] + sampled])
    return logps.max(-1, keepdim=True).values - logps.gather(-1, torch.tensor(sampled, device=logps.device)[:, None])
