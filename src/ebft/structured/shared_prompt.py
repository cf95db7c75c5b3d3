"""Log-probabilities of completions that share prompts, from one forward pass in which each prompt is computed once.

The pass runs [prompts | completions | references] without padding: every completion, of any length, attends to its
prompt and to itself.

B  completions   C  tokens of the longest completion   P  prompts   S  prompt tokens   R  scored tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.machine import copy_to
from ebft.prefix.attention import PromptLayout, SuffixPass
from ebft.prefix.forward import backbone_states, head_of, run_wrapped
from ebft.prefix.logps import Head, token_logps, token_logps_and_entropy
from ebft.prefix.sampling import Truncation, on_device

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
    truncation: Truncation | None = None,
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
            (predictors,) = copy_to(states.device, (~is_last).nonzero().squeeze(1))
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
        return cls(shared, *(on_device(index, prompts.device) for index in indices), of_row)

    def references(self, scores: CompletionScores, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the references' log-probabilities, as `like` (B, tokens), and each row's sum over its prompt (B,)."""
        logps = put_back(scores.references, self.reference_index, like)
        if scores.prompts is None:
            return logps, None
        of_prompts = scores.prompts.split([len(prompt.ids) - 1 for prompt in self.prompts])
        return logps, torch.stack([of_prompts[number].sum() for number in self.of_row])

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(p.ids) + max((len(ids) for ids in _suffixes(p)), default=0) for p in self.prompts)


def put_back(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Return the values (R,) as a tensor with the shape of `like`, 0 elsewhere."""
    return values.new_zeros(like.numel()).index_copy(0, index, values).view(like.shape)


def up_to_last(mask: Tensor) -> Tensor:
    """Return the mask (B, tokens) of all tokens up to the last one in `mask`."""
    return mask.flip(-1).cummax(-1).values.flip(-1)


def _suffixes(prompt: Prompt) -> list[Tensor]:
    return prompt.completions + prompt.references


def _predictors(layout: PromptLayout, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return the indices of the states that predict the tokens of all completions, and of all references.

    The first token of a suffix is predicted by the last token of its prompt, each later token by the token before it.
    """
    completions, references, first = [], [], layout.spans[-1][1]
    for prompt, (_, end), lengths in zip(prompts, layout.spans, layout.suffixes):
        for index, length in enumerate(lengths):
            found = [end - 1, *range(first, first + length)]
            (completions if index < len(prompt.completions) else references).extend(found)
            first += length
    return on_device(completions, layout.device), on_device(references, layout.device)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like[:0], *parts])


def _text_logps(states: Tensor, targets: Tensor, head: Head) -> Tensor:
    return token_logps(states, targets[:, None], head, 1.0).squeeze(-1)
