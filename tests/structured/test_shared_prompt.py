"""One forward pass for all completions of several prompts, against one forward pass per sequence."""

import copy

import pytest
import torch

from ebft.prefix.forward import prepare
from ebft.structured.shared_prompt import Prompt, score_completions
from tests.strided.families import FAMILIES, VOCAB, lora_targets, tiny_model
from tests.strided.test_exactness import compare_gradients, with_lora
from tests.structured import oracle

TEMPERATURE = 0.7


def prompts(seed=0):
    """Prompts of 9, 1 and 23 tokens with several completions of unequal lengths, one of a single token."""
    generator = torch.Generator().manual_seed(seed)
    ids = lambda length: torch.randint(3, VOCAB, (length,), generator=generator)
    return [
        Prompt(ids(9), [ids(5), ids(1), ids(12)], [ids(7)]),
        Prompt(ids(1), [ids(4)]),
        Prompt(ids(23), [ids(6), ids(6)], [ids(1), ids(3)]),
    ]


def weights(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def total(logps, entropies, references, with_entropy):
    """A scalar in which every value has another weight."""
    result = (weights(len(logps), 1) * logps).sum() + (weights(len(references), 2) * references).sum()
    return result + (weights(len(entropies), 3) * entropies).sum() if with_entropy else result


def expected(model, batch):
    """Log-probabilities and entropies of completions, and log-probabilities of references, sequence by sequence."""
    logps, entropies, references = [], [], []
    for prompt in batch:
        for ids in prompt.completions:
            logits = model(input_ids=torch.cat([prompt.ids, ids])[None]).logits[0, len(prompt.ids) - 1 : -1]
            scores = (logits.double() / TEMPERATURE).log_softmax(-1)
            logps.append(scores.gather(-1, ids[:, None]).squeeze(-1))
            entropies.append(-(scores.exp() * scores).sum(-1))
        for ids in prompt.references:
            references.append(oracle.token_logps(model, prompt.ids.tolist(), ids.tolist(), 1.0))
    return torch.cat(logps), torch.cat(entropies), torch.cat(references)


def compare(model, batch, entropy_gradient):
    plain = copy.deepcopy(model).eval()
    prepare(model.eval())
    found = score_completions(model, batch, temperature=TEMPERATURE, entropy_gradient=entropy_gradient)
    wanted = expected(plain, batch)
    for ours, theirs in zip((found.logps, found.entropies, found.references), wanted):
        torch.testing.assert_close(ours.detach(), theirs.detach().float(), atol=1e-4, rtol=0)
    total(found.logps, found.entropies, found.references, entropy_gradient).backward()
    total(*wanted, entropy_gradient).backward()
    compare_gradients(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_family_with_lora(family):
    compare(with_lora(tiny_model(family), target_modules=lora_targets(family)), prompts(), entropy_gradient=False)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2", "gemma3_text", "mixtral"])
def test_family_full_fine_tuning(family, entropy_gradient):
    compare(tiny_model(family), prompts(1), entropy_gradient)
