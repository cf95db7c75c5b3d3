"""One forward pass for all completions of several prompts, against one forward pass per sequence."""

import copy

import pytest
import torch

from ebft.prefix.attention import suffixes
from ebft.prefix.forward import prepare
from ebft.structured.scoring import Prompt, score_completions
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


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_adjacent_prompts_are_computed_at_once(family, monkeypatch):
    """Of unequal lengths, as on a GPU; others have another number of completions."""
    ids = lambda length, seed: torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    sizes = [(9, [5, 2, 12]), (4, [3, 3, 3]), (17, [2, 2, 8]), (6, [4, 1]), (6, [9]), (5, [1]), (7, [3]), (8, [2, 4])]
    sizes.append((8, [3, 9]))
    drawn = [(ids(size, n), [ids(own, 10 * n + i) for i, own in enumerate(own)]) for n, (size, own) in enumerate(sizes)]
    batch = [Prompt(prompt, own[:1], own[1:]) for prompt, own in drawn]
    lengths = [[own - 1 for own in lengths] for _, lengths in sizes]
    grouped = lambda: [
        group.prompts.lengths
        for group in suffixes.PromptLayout([size for size, _ in sizes], lengths, torch.device("cpu")).groups
    ]
    assert grouped() == [[9], [4], [17], [6], [6], [7], [8], [8]]  # a completion of one token is only scored
    monkeypatch.setitem(suffixes._MOST_PADDING, "cpu", 10.0)
    monkeypatch.setitem(suffixes._HEADS_AS_ROWS, "cpu", 0)
    assert grouped() == [[9, 4, 17], [6, 6, 7], [8, 8]]
    compare(tiny_model(family), batch, entropy_gradient=False)
    monkeypatch.setattr(suffixes, "_MOST_SCORES", 3 * 2 * 256 * (4 + 9))
    assert grouped() != [[9, 4, 17], [6, 6, 7], [8, 8]]
