"""Scoring of completions in the loss: one forward pass in which each prompt is computed once, or TRL's padded rows.

The pass runs [prompts | completions | references] without padding: every completion, of any length, attends to its
prompt and to itself.

B  completions   C  tokens of the longest completion   P  prompts   S  prompt tokens   R  scored tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft import errors, machine, transformers_internals
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.models.pretrained import rates_as_loaded
from ebft.prefix import parity, sampling
from ebft.prefix.attention import PromptLayout, SuffixPass
from ebft.prefix.attention.passes import HINT
from ebft.prefix.forward import backbone_states, head_of, last_logits, most_tokens, prepare, run_wrapped
from ebft.prefix.logps import Head, token_logps, token_logps_and_entropy
from ebft.structured.rollouts.local import Generator, SharedPromptSampler
from ebft.structured.rollouts.turns import Sampling

Padded = tuple[Tensor, Tensor]  # ids and mask (B, tokens)


@dataclass
class Prompt:
    """A prompt with the suffixes that follow it. All are non-empty tensors of token ids on the model's device."""

    ids: Tensor
    completions: list[Tensor] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)


class CompletionScores(NamedTuple):
    """Results for the completions of all prompts, in order, concatenated: (R,) each, in float32.

    `logps` and `entropies` are of the distribution that is sampled from; `references` are the log-probabilities
    of the tokens of references at temperature 1, and `prompts` those at each prompt's tokens but the first.
    """

    logps: Tensor
    entropies: Tensor | None
    references: Tensor
    prompts: Tensor | None


def score_completions(
    model: nn.Module,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    truncation: sampling.Truncation | None = None,
    with_entropies: bool = True,
    entropy_gradient: bool = False,
    score_prompts: bool = False,
) -> CompletionScores:
    """Score the completions and references of all prompts in one forward pass through `model`, which may be wrapped.

    The causal LM inside `model` must have been prepared with `ebft.prefix.forward.prepare`. The last token of a suffix
    is scored but is not an input. Results and gradients equal one forward pass per sequence.
    """
    suffixes = [_suffixes(prompt) for prompt in prompts]
    tokens = torch.cat([*(prompt.ids for prompt in prompts), *(ids[:-1] for own in suffixes for ids in own)])
    layout = PromptLayout(
        [len(prompt.ids) for prompt in prompts], [[len(ids) - 1 for ids in own] for own in suffixes], tokens.device
    )
    completions, references = _predictors(layout, prompts)

    def forward(causal_lm: PreTrainedModel) -> tuple[Tensor | None, ...]:
        states = backbone_states(causal_lm, tokens, SuffixPass(layout, apply_dropout=True))
        head = head_of(causal_lm)
        scored = states.index_select(0, completions)
        targets = _joined([ids for prompt in prompts for ids in prompt.completions], tokens)
        if with_entropies:
            logps, entropies = token_logps_and_entropy(scored, targets, head, temperature, entropy_gradient, truncation)
        else:
            logps, entropies = token_logps(scored, targets[:, None], head, temperature, truncation).squeeze(-1), None
        targets = _joined([ids for prompt in prompts for ids in prompt.references], tokens)
        of_references = _text_logps(states.index_select(0, references), targets, head)
        of_prompts = None
        if score_prompts:
            lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
            is_last = torch.zeros(int(lengths.sum()), dtype=torch.bool)
            is_last[lengths.cumsum(0) - 1] = True
            (predictors,) = machine.copy_to(states.device, (~is_last).nonzero().squeeze(1))
            targets = _joined([prompt.ids[1:] for prompt in prompts], tokens)
            of_prompts = _text_logps(states[predictors], targets, head)
        return logps, entropies, of_references, of_prompts

    return CompletionScores(*run_wrapped(model, forward))


@dataclass
class Rows:
    """Padded rows, as in TRL, sorted into prompts; indices of their tokens among the entries of padded tensors."""

    prompts: list[Prompt]
    completion_index: Tensor  # (R,), among B * C
    reference_index: Tensor  # (R,), among B * tokens of the longest reference
    of_row: list[int]  # the number of each row's prompt

    @classmethod
    def of(cls, prompts: Padded, completions: Padded, references: Padded | None = None) -> Rows:
        """Sort rows by their prompts, which are padded on the left; completions and references are padded on the right.

        A row whose mask is all zeros has no completion or no reference.
        """
        suffixes = [completions] if references is None else [completions, references]
        parts = [*prompts, *(mask for _, mask in suffixes)]
        host = torch.cat(parts, 1).cpu().split([part.shape[1] for part in parts], 1)  # one wait for all
        prompts, ends = prompts[0], [up_to_last(mask).sum(-1).tolist() for mask in host[2:]]
        found: dict[tuple[int, ...], int] = {}
        lengths = host[1].sum(1).tolist()
        of_row = [
            found.setdefault(tuple(ids[len(ids) - length :]), len(found))
            for ids, length in zip(host[0].tolist(), lengths)
        ]
        rows = [[row for row, prompt in enumerate(of_row) if prompt == number] for number in range(len(found))]
        shared = [Prompt(prompts[own[0]][prompts.shape[1] - lengths[own[0]] :]) for own in rows]
        indices: list[list[int]] = [[], []]
        for (ids, _), end, index, name in zip(suffixes, ends, indices, ("completions", "references")):
            for prompt, own in zip(shared, rows):
                own = [row for row in own if end[row]]
                getattr(prompt, name).extend(ids[row, : end[row]] for row in own)
                index += [row * ids.shape[1] + step for row in own for step in range(end[row])]
        return cls(shared, *(sampling.on_device(index, prompts.device) for index in indices), of_row)

    def references(self, scores: CompletionScores, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the references' log-probabilities, as `like` (B, tokens), and each row's sum over its prompt (B,)."""
        logps = put_back(scores.references, self.reference_index, like)
        if scores.prompts is None:
            return logps, None
        of_prompts = scores.prompts.split([len(prompt.ids) - 1 for prompt in self.prompts])
        return logps, torch.stack([of_prompts[number].sum() for number in self.of_row])


def put_back(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Return the values (R,) as a tensor with the shape of `like`, 0 elsewhere."""
    return values.new_zeros(like.numel()).index_copy(0, index, values).view(like.shape)


def up_to_last(mask: Tensor) -> Tensor:
    """Return the mask (B, tokens) of all tokens up to the last one in `mask`."""
    return mask.flip(-1).cummax(-1).values.flip(-1)


def _suffixes(prompt: Prompt) -> list[Tensor]:
    return prompt.completions + prompt.references


def _predictors(layout: PromptLayout, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return the indices of the states, each of the token before, that predict all completions, and all references."""
    completions, references, first = [], [], layout.spans[-1][1]
    for prompt, (_, end), lengths in zip(prompts, layout.spans, layout.suffixes):
        for index, length in enumerate(lengths):
            found = [end - 1, *range(first, first + length)]
            (completions if index < len(prompt.completions) else references).extend(found)
            first += length
    return sampling.on_device(completions, layout.device), sampling.on_device(references, layout.device)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like[:0], *parts])


def _text_logps(states: Tensor, targets: Tensor, head: Head) -> Tensor:
    return token_logps(states, targets[:, None], head, 1.0).squeeze(-1)


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
            except errors.ModelError as error:
                self.shares_prompts = False
                cause = str(error).replace(HINT, "").strip().rstrip(".")
                message = f"Prompts are computed once per completion, because they cannot be shared: {cause}."
                errors.warn(message)
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
            truncation=sampling.Truncation.of(*cut) if self.scores_truncated else None,
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
        longest = max(len(p.ids) + max(map(len, _suffixes(p)), default=0) for p in rows.prompts)
        trainer, are_longer = self._trainer, longest > self._most_tokens
        if trainer.accelerator.num_processes > 1:
            of_process = torch.tensor([float(are_longer)], device=trainer.args.device)
            are_longer = bool(trainer.accelerator.reduce(of_process, "sum").item())
        if not are_longer:
            return False
        if not self._has_warned:
            self._has_warned = True
            errors.warn(
                f"Prompts are computed once per completion for sequences of more than {self._most_tokens} tokens, "
                "because the model's rotary frequencies change at this length."
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
    with parity.refusing(causal_lm), torch.random.fork_rng():
        torch.manual_seed(0)
        with evaluating(causal_lm):
            sample = SharedPromptSampler(Sampling(temperature=1.0))
            sampled = sample(causal_lm, [prompt + ids for ids in suffixes], [_SAMPLED] * len(suffixes))
            completions = [ids + completion.ids for ids, completion in zip(suffixes, sampled)]
            tensors, expected = [torch.tensor(ids, device=causal_lm.device) for ids in (prompt, *completions)], []
            with rates_as_loaded(causal_lm), transformers_internals.override_attn_implementation(causal_lm, "eager"):
                for ids in tensors[1:]:
                    logits = causal_lm(input_ids=torch.cat([tensors[0], ids])[None], use_cache=False).logits
                    logps = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                    expected.append(logps.gather(-1, ids[:, None]).squeeze(-1))
            causal_lm.train(as_trained)
            scores = score_completions(causal_lm, [Prompt(tensors[0], tensors[1:])], temperature=1.0)
            causal_lm.eval()
            parity.check_distant_tokens(causal_lm)
        of_samples = torch.cat([logps[-_SAMPLED:] for logps in expected]).cpu()
        found = torch.tensor([logp for completion in sampled for logp in completion.logps])
        parity.compare(causal_lm, "log-probabilities of samples with shared prompts", (found - of_samples).abs())
        parity.compare(causal_lm, "log-probabilities with shared prompts", (scores.logps - torch.cat(expected)).abs())


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
    with parity.refusing(causal_lm, "padded rows", _ADVICE), torch.random.fork_rng(), evaluating(causal_lm):
        with rates_as_loaded(causal_lm):
            expected = _logps(causal_lm, [shorter])
        causal_lm.train(as_trained)
        found = _logps(causal_lm, [longer, shorter])
        causal_lm.eval()
        completion = torch.tensor(shorter[-_COMPLETION:], device=found.device)
        differences = (found - expected).gather(-1, completion[:, None]).abs()
        parity.compare(causal_lm, "log-probabilities of a padded row", differences, _CAUSE)
        if samples:
            prompts = [row[:length] for row, length in zip((longer, shorter), _PROMPTS)]
            greedy = Generator(Sampling(temperature=0.0), pad_token_id=0)
            sampled = greedy(causal_lm, prompts, [_COMPLETION] * len(prompts))[-1].ids
            logps = _logps(causal_lm, [prompts[-1] + sampled])
            chosen = logps.gather(-1, torch.tensor(sampled, device=logps.device)[:, None])
            parity.compare(causal_lm, "samples of a padded prompt", logps.max(-1, keepdim=True).values - chosen, _CAUSE)


def _logps(causal_lm: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    """Return the log-probabilities (tokens, V) of the last row's completion, with rows padded on the left."""
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in rows], device=causal_lm.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=causal_lm.device)
    return last_logits(causal_lm, tokens, mask, _COMPLETION + 1)[-1, :-1].float().log_softmax(-1)
