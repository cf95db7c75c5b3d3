"""Rollouts from the policy's weights in which each prompt is prefilled once and its cache shared by all samples.

N  samples    V  vocabulary
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import is_sharded
from ebft.prefix.attention import DecodePass, PromptLayout, SharedCache, SuffixPass
from ebft.prefix.head import head_of
from ebft.prefix.policy import backbone_states, run_wrapped
from ebft.prefix.sampling import Truncation, sample_tokens
from ebft.prefix.softmax import Softmax
from ebft.structured.rollouts.backend import Completion, Sampling


class SharedPromptSampler:
    """Samples as transformers' `generate` does with the same parameters; `temperature` 0 is greedy decoding.

    Samples that have ended are dropped from the batch, and nothing is padded. The log-probabilities are those of the
    distribution that is sampled from.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._temperature, self._end_ids = sampling.temperature, sorted(sampling.end_ids)
        self._truncation = Truncation.of(sampling.top_k, sampling.top_p, sampling.min_p)

    @staticmethod
    def supports(sampling: Sampling) -> bool:
        """Whether there are no parameters that only `generate` has."""
        return not sampling.extra and sampling.repetition_penalty == 1 and sampling.regex is None

    def __call__(self, model: nn.Module, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """Return one completion per prompt; the model must be prepared, in eval mode, with gradients disabled."""
        policy = model if is_sharded(model) else unwrap_adapter(model)
        return run_wrapped(policy, lambda causal_lm: self._sample(causal_lm, prompts, max_tokens))

    def _sample(self, causal_lm: PreTrainedModel, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        device, head = causal_lm.device, head_of(causal_lm)
        layout, tokens, last = _prefill_layout(prompts, device)
        prefill = SuffixPass(layout, keeps_keys=True)
        states = backbone_states(causal_lm, tokens, prefill)[last]
        cache = SharedCache(prefill)
        ids, logps = ([[] for _ in prompts] for _ in range(2))
        live, limits, ends = torch.arange(len(prompts)), torch.tensor(max_tokens), torch.tensor(self._end_ids)
        for length in range(1, max(max_tokens) + 1):
            token, logp = self._draw(head.logits(states))
            for index, drawn, value in zip(live.tolist(), token.tolist(), logp.tolist()):
                ids[index].append(drawn)
                logps[index].append(value)
            goes_on = (limits[live] > length) & ~torch.isin(token.cpu(), ends)
            if not goes_on.any():
                break
            if not goes_on.all():
                kept = goes_on.nonzero().squeeze(1)
                live, token = live[kept], token[kept.to(device)]
                cache.keep(kept.to(device))
            states = backbone_states(causal_lm, token, DecodePass(cache))
            cache.advance()
        return [Completion(*sampled) for sampled in zip(ids, logps)]

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next token of every sample and its log-probability, (N,) each, given logits (N, V)."""
        if self._temperature == 0:
            softmax = Softmax(logits, 1.0)
            token = softmax.most_likely()
        else:
            softmax = Softmax(logits, self._temperature, self._truncation)
            token = sample_tokens(softmax.probabilities, torch.rand(len(logits), 1, device=logits.device))
        return token.squeeze(-1), softmax.logps(token).squeeze(-1)


def _prefill_layout(contexts: list[list[int]], device: torch.device) -> tuple[PromptLayout, Tensor, Tensor]:
    """Return the layout of the contexts, its tokens, and the index of every context's last token among these.

    Adjacent contexts share a prompt if they are equal, or, where all differ, for as long as most of it is equal, as in
    later turns of a conversation.
    """
    groups = [list(group) for _, group in groupby(range(len(contexts)), key=lambda index: contexts[index])]
    prompts = [contexts[group[0]] for group in groups]
    if len(groups) == len(contexts):
        groups, prompts = _with_common_prefixes(contexts)
    suffixes = [[contexts[index][len(prompt) :] for index in group] for prompt, group in zip(prompts, groups)]
    tokens = [token for ids in [*prompts, *(ids for own in suffixes for ids in own)] for token in ids]
    lengths = [[len(ids) for ids in own] for own in suffixes]
    last, end, position = [], 0, sum(map(len, prompts))
    for prompt, own in zip(prompts, lengths):
        end += len(prompt)
        for length in own:
            position += length
            last.append(position - 1 if length else end - 1)
    layout = PromptLayout([len(prompt) for prompt in prompts], lengths, device)
    return layout, torch.tensor(tokens, device=device), torch.tensor(last, device=device)


def _with_common_prefixes(contexts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return groups of adjacent contexts, and the prefix that the contexts of each group have in common."""
    groups, prefixes = [[0]], [contexts[0]]
    for index, context in enumerate(contexts[1:], 1):
        prefix = prefixes[-1]
        common = next((i for i, (a, b) in enumerate(zip(prefix, context)) if a != b), min(len(prefix), len(context)))
        if 2 * common >= max(len(prefix), 1):
            groups[-1].append(index)
            prefixes[-1] = prefix[:common]
        else:
            groups.append([index])
            prefixes.append(context)
    return groups, prefixes
