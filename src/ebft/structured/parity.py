"""A parity check before training: samples and scores with shared prompts must agree with the plain model.

Model features that are known to be unsupported raise an error that names them; this check detects the unknown ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.models.causal_lm import evaluating
from ebft.models.trainable import rates_as_loaded
from ebft.over_transformers import override_attn_implementation
from ebft.prefix.agreement import compare, refusing
from ebft.prefix.distant_tokens import check_distant_tokens
from ebft.prefix.policy import prepare
from ebft.structured.rollouts.backend import Sampling
from ebft.structured.rollouts.shared import SharedPromptSampler
from ebft.structured.shared_prompt import Prompt, score_completions

_PROMPT, _SUFFIXES, _SAMPLED = 8, (1, 4, 2), 3  # tokens


def check_parity(causal_lm: PreTrainedModel, as_trained: bool = True) -> None:
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
