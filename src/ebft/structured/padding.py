"""A check before training with padded rows: padding on the left must not change the results of a row.

Attention does not see padding, but a running state passes over it, and some architectures update the state there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.models.causal_lm import evaluating
from ebft.models.trainable import rates_as_loaded
from ebft.prefix.agreement import compare, refusing
from ebft.prefix.policy import last_logits
from ebft.structured.rollouts.backend import Sampling
from ebft.structured.rollouts.hf import Generator

_PROMPTS, _COMPLETION = (13, 4), 6  # tokens
_HINT = (
    "Structured EBFT and GRPO, which pad shorter prompts on the left, cannot train this model; SFT, which pads on the "
    "right, can"
)
_CAUSE = f"Its layers do not skip padding. {_HINT}"


def check_padding(causal_lm: PreTrainedModel, as_trained: bool = True, samples: bool = True) -> None:
    """Raise ModelError if padding on the left changes the log-probabilities of a short random row.

    In training mode if `as_trained`, as the loss scores it; with `samples`, also as `generate` samples it, whose tokens
    must be the most probable ones. Does not change the state of the random number generators.
    """
    vocabulary, generator = causal_lm.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(0, vocabulary, (length,), generator=generator).tolist()
    longer, shorter = (draw(length + _COMPLETION) for length in _PROMPTS)
    with refusing(causal_lm, "padded rows", _HINT), torch.random.fork_rng(), evaluating(causal_lm):
        with rates_as_loaded(causal_lm):
            expected = _logps(causal_lm, [shorter])
        causal_lm.train(as_trained)
        found = _logps(causal_lm, [longer, shorter])
        causal_lm.eval()
        compare(causal_lm, "log-probabilities of a padded row", _of_tokens(found - expected, shorter), _CAUSE)
        if samples:
            compare(causal_lm, "samples of a padded prompt", _surprise(causal_lm, longer, shorter), _CAUSE)


def _logps(causal_lm: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    """Return the log-probabilities (tokens, V) of the last row's completion, with rows padded on the left."""
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in rows], device=causal_lm.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=causal_lm.device)
    return last_logits(causal_lm, tokens, mask, _COMPLETION + 1)[-1, :-1].float().log_softmax(-1)


def _of_tokens(differences: Tensor, row: list[int]) -> Tensor:
    completion = torch.tensor(row[-_COMPLETION:], device=differences.device)
    return differences.gather(-1, completion[:, None]).abs()


def _surprise(causal_lm: PreTrainedModel, longer: list[int], shorter: list[int]) -> Tensor:
    """Return by how much the most probable tokens are more probable than those sampled greedily in a padded batch."""
    prompts = [row[:length] for row, length in zip((longer, shorter), _PROMPTS)]
    greedy = Generator(Sampling(temperature=0.0), pad_token_id=0)
    sampled = greedy(causal_lm, prompts, [_COMPLETION] * len(prompts))[-1].ids
    logps = _logps(causal_lm, [prompts[-1] + sampled])
    return logps.max(-1, keepdim=True).values - logps.gather(-1, torch.tensor(sampled, device=logps.device)[:, None])
