"""Sampling in the training process, with generate() and with shared prompts: log-probabilities, tokens and ends."""

import pytest
import torch

from ebft.models.causal_lm import evaluating
from ebft.prefix.attention import decoding, suffixes
from ebft.prefix.forward import prepare
from ebft.structured.rollouts import client, local
from ebft.structured.rollouts.local import Generator, HFBackend, SharedPromptSampler
from ebft.structured.rollouts.turns import Sampling
from tests.devices.recording import PretendRecording, pretend_recordings
from tests.prefix.test_logps import truncated
from tests.strided.families import FAMILIES, VOCAB, tiny_model
from tests.structured import oracle
from tests.structured.conftest import chat_model


def contexts():
    """Three samples of one prompt, one of another, and two of a third, of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    first, second, third = (torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (9, 2, 21))
    return [first] * 3 + [second] + [third] * 2


def later_turns():
    """Contexts that share a prompt of 9 or 14 tokens, and differ after it."""
    generator = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(3, VOCAB, (n,), generator=generator).tolist()
    prompts = [ids(9)] * 3 + [ids(14)] * 2
    return [prompt + ids(n) for prompt, n in zip(prompts, (4, 1, 7, 3, 3))]


HOW = {"prompt by prompt": 0.0, "batched": 10.0, "recorded": 0.0}  # the most padding
PAIRS = lambda: [contexts()[index] for index in (0, 0, 3, 3, 4, 4)]


def sample(model, prompts, limits, *, shared=True, **sampling):
    prepare(model)
    sampling = Sampling(**{"temperature": 0.7, **sampling})
    sampler = SharedPromptSampler(sampling, cuda_graphs=True) if shared else Generator(sampling, pad_token_id=0)
    with evaluating(model):
        return sampler(model, prompts, limits)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_beyond_the_tokenizer_are_not_sampled(shared, temperature):
    model, prompts = tiny_model("llama").eval(), contexts()
    found = sample(model, prompts, [20] * len(prompts), shared=shared, temperature=temperature, unknown=range(8, VOCAB))
    assert max(max(completion.ids) for completion in found) < 8
    body = client._body("model", [1], 2, 1, Sampling(temperature, unknown=range(8, 10)))  # of vLLM
    assert body["logit_bias"] == {"8": -100, "9": -100}
    assert "logit_bias" not in client._body("model", [1], 2, 1, Sampling(temperature))


@pytest.mark.first(20)
@pytest.mark.parametrize(("family", "shared", "make"), [
    ("llama", "recorded", contexts), ("gemma2", "recorded", contexts), ("gpt_oss", "recorded", later_turns),
    *((family, "copied", make) for family in FAMILIES for make in (contexts, later_turns)),
    *((family, *how) for family in ("llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2")
      for how in (("prompt by prompt", contexts), ("prompt by prompt", later_turns), ("batched", PAIRS))),
])  # fmt: skip
def test_log_probabilities_are_those_of_the_plain_model(family, shared, make, monkeypatch):
    if shared != "copied":  # as prompts of more than 128 tokens, and on a GPU
        monkeypatch.setattr(decoding, "_SHORT", 0)
        monkeypatch.setattr(decoding, "_GROWTH", 3 if shared == "recorded" else 1)
        monkeypatch.setitem(suffixes.MOST_PADDING, "cpu", HOW[shared])
    if shared == "recorded":
        pretend_recordings(monkeypatch)
    model = tiny_model(family).eval()
    prompts = make()
    limits = [4, 9, 1, 12, 7, 12][: len(prompts)]
    found = sample(model, prompts, limits)
    assert [len(completion.ids) for completion in found] == limits
    with torch.no_grad():
        for prompt, completion in zip(prompts, found):
            expected = oracle.token_logps(model, prompt, completion.ids, 0.7)
            torch.testing.assert_close(torch.tensor(completion.logps), expected.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family,shared", [("llama", True), ("llama", False), ("gemma3_text", True), ("gpt_oss", True)])
def test_greedy_tokens_are_the_most_likely(family, shared):
    model = tiny_model(family).eval()
    found = sample(model, contexts(), [70] * 6, shared=shared, temperature=0.0)
    for prompt, completion in zip(contexts(), found):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == completion.ids


def test_each_sample_ends_by_itself():
    """With `generate`; samples with shared prompts are compared with plain ones below."""
    ends = frozenset(range(3, 30))
    torch.manual_seed(0)
    prompts, limits = contexts() * 10, [3, 9, 30, 1, 20, 20] * 10
    ended = 0
    found = sample(tiny_model("llama").eval(), prompts, limits, shared=False, end_ids=ends)
    for completion, limit in zip(found, limits):
        assert not ends & set(completion.ids[:-1])
        assert completion.logps is None
        assert len(completion.ids) == limit or completion.ids[-1] in ends
        ended += len(completion.ids) < limit
    assert 10 < ended < 60


def plain_samples(model, prompts, limits, ends):
    """Samples of whole sequences, one forward pass each, with one random number for each sample that has not ended."""
    found = [[] for _ in prompts]
    for _ in range(max(limits)):
        live = [i for i, ids in enumerate(found) if len(ids) < limits[i] and not ends & set(ids)]
        for index, number in zip(live, torch.rand(len(live)).tolist()):
            logits = model(input_ids=torch.tensor([prompts[index] + found[index]])).logits[0, -1]
            sums = (logits.double() / 0.7).softmax(-1).cumsum(-1)
            found[index].append(int((sums <= number * sums[-1]).sum()))
    return found


@pytest.mark.parametrize(("tokens", "recorded"), [(1, False), (3, False), (8, True), (8, False)])
def test_samples_are_the_same_however_many_tokens_are_read_at_once(tokens, recorded, monkeypatch):
    """As are the random numbers that later draws get."""
    if recorded:
        pretend_recordings(monkeypatch)
    monkeypatch.setitem(local._TOKENS_PER_READ, "cpu", tokens)
    model, ends = tiny_model("llama").eval(), frozenset(range(3, 18))
    prompts, limits = contexts() * 3, [3, 9, 20, 1, 20, 20] * 3
    torch.manual_seed(0)
    with torch.no_grad():
        wanted = plain_samples(model, prompts, limits, ends)
    after = torch.rand(3)
    assert sum(len(ids) < limit for ids, limit in zip(wanted, limits)) > 8 and max(map(len, wanted)) > 9
    torch.manual_seed(0)
    found = sample(model, prompts, limits, end_ids=ends)
    assert [completion.ids for completion in found] == wanted and torch.equal(torch.rand(3), after)
    assert all(len(completion.logps) == len(completion.ids) for completion in found)
    assert not recorded or PretendRecording.replays > 2 * PretendRecording.count > 0


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}])
def test_filters_are_those_of_generate(changes):
    """Only tokens that `generate` can draw are drawn, all of them, with their log-probability among these."""
    model, prompt, count = tiny_model("llama").eval(), contexts()[0], 400
    torch.manual_seed(0)
    found = sample(model, [prompt] * count, [1] * count, **changes)
    arguments = {"top_k": 0, "top_p": 1.0, **changes, "do_sample": True, "temperature": 0.7, "max_new_tokens": 1}
    ids = model.generate(torch.tensor([prompt] * count), **arguments, pad_token_id=0)[:, -1].tolist()
    drawn = {completion.ids[0] for completion in found}
    assert drawn == set(ids) and 1 < len(drawn) < 12
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1:].double() / 0.7
    logps = truncated(logits, torch.tensor([[found[0].ids[0]]]), **changes)[0]
    assert logps.isfinite().sum() == len(drawn)
    assert found[0].logps == pytest.approx([logps[found[0].ids[0]].item()], abs=1e-4)


@pytest.mark.parametrize("sampler", [SharedPromptSampler, Generator])
def test_the_policy_samples_what_is_scored(chat_tokenizer, build, sampler):
    """Frequencies of first tokens against the policy's own distribution at the temperature, by chi squared."""
    policy, count = chat_model(chat_tokenizer), 4000
    policy.generation_config.update(top_k=1, no_repeat_ngram_size=2, suppress_tokens=[5, 6])  # must not come in
    trainer = build(policy, shared_prefix=sampler is SharedPromptSampler)
    backend = HFBackend(trainer, Sampling(0.7), chat_tokenizer.pad_token_id)
    assert type(backend._sample) is sampler
    torch.manual_seed(1)
    firsts = torch.tensor([c.ids[0] for c in backend.generate([[10, 11, 12]] * count, [1] * count)])
    with torch.no_grad():
        logps = torch.stack([oracle.token_logps(policy, [10, 11, 12], [t], 0.7)[0] for t in range(len(chat_tokenizer))])
    expected = logps.exp() * count
    common = expected > 5
    observed = torch.bincount(firsts, minlength=len(chat_tokenizer)).double()
    squares = ((observed - expected) ** 2 / expected)[common].sum()
    freedom = common.sum()
    assert squares < freedom + 5 * (2 * freedom) ** 0.5
