"""Rollouts by the policy's own generate: own limits, end tokens, and the distribution that is asked for."""

import pytest
import torch

from ebft.structured.rollouts.local import HFBackend
from ebft.structured.rollouts.turns import Sampling
from tests.structured import oracle
from tests.structured.conftest import chat_model


@pytest.fixture
def backend(build, chat_tokenizer):
    def made(policy, **sampling):
        return HFBackend(build(policy), Sampling(**{"temperature": 0.7, **sampling}), chat_tokenizer.pad_token_id)

    return made


def test_limits_and_ends_are_each_rows_own(chat_tokenizer, backend):
    made = backend(chat_model(chat_tokenizer), end_ids=frozenset(range(100, 140)))
    torch.manual_seed(0)
    prompts = [[10, 11, 12], [20], [30, 31]] * 20
    limits = [3, 9, 30] * 20
    ended = 0
    for completion, limit in zip(made.generate(prompts, limits), limits):
        assert 1 <= len(completion.ids) <= limit and len(completion.logps) == len(completion.ids)
        body, last = completion.ids[:-1], completion.ids[-1]
        assert not any(100 <= token < 140 for token in body)
        assert len(completion.ids) == limit or 100 <= last < 140
        ended += len(completion.ids) < limit
    assert 10 < ended < 60


def test_it_samples_what_is_scored(chat_tokenizer, backend):
    """Frequencies of first tokens against the policy's own distribution at the temperature, by chi squared."""
    policy = chat_model(chat_tokenizer)
    policy.generation_config.update(top_k=1, no_repeat_ngram_size=2, suppress_tokens=[5, 6])  # must not come in
    made = backend(policy)
    torch.manual_seed(1)
    count = 4000
    firsts = torch.tensor([c.ids[0] for c in made.generate([[10, 11, 12]] * count, [1] * count)])
    with torch.no_grad():
        logps = torch.stack([oracle.token_logps(policy, [10, 11, 12], [t], 0.7)[0] for t in range(len(chat_tokenizer))])
    expected = logps.exp() * count
    common = expected > 5
    observed = torch.bincount(firsts, minlength=len(chat_tokenizer)).double()
    squares = ((observed - expected) ** 2 / expected)[common].sum()
    freedom = common.sum()
    assert squares < freedom + 5 * (2 * freedom) ** 0.5


def test_prompts_of_unequal_length_do_not_see_each_other(chat_tokenizer, backend):
    policy = chat_model(chat_tokenizer)
    made = backend(policy, temperature=0.01)
    prompts = [list(range(10, 10 + length)) for length in (1, 7, 30)]
    found = [completion.ids for completion in made.generate(prompts, [6, 6, 6])]
    for prompt, ids in zip(prompts, found):
        context = list(prompt)
        with torch.no_grad():
            for token in ids:
                assert policy(input_ids=torch.tensor([context])).logits[0, -1].argmax() == token
                context.append(token)
