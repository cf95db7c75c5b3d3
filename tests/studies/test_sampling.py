"""Full completions: against generate() of transformers, ends of completions, and noise that no batch changes."""

import pytest
import torch
from sampling import STOPS, Sampler, draw
from transformers import LlamaConfig, LlamaForCausalLM

from tests.studies.tiny_tokenizer import tokenizer_of

PROMPTS = ["def f(x):", "a longer prompt than the other one:", "x", "def g(y, z): return"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer_of()), **shape, num_key_value_heads=1, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def sampler(model, **settings) -> Sampler:
    return Sampler(model, tokenizer_of(), STOPS["functions"], **{"max_new_tokens": 24, **settings})


def test_greedy_completions_are_those_of_generate(model):
    tokenizer = tokenizer_of()
    found = sampler(model, rows=3).complete(PROMPTS, 1, 0.0)
    for prompt, (text,) in zip(PROMPTS, found):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        new = wanted[0, ids.shape[1] :].tolist()
        assert text == sampler(model).text(new)


def test_noise_belongs_to_prompt_and_sample(model):
    """Not to the other rows of the batch, nor to those that have left it."""
    alone = sampler(model, rows=1).complete(PROMPTS, 3, 1.0)
    together = sampler(model, rows=64).complete(PROMPTS, 3, 1.0)
    assert alone == together
    assert len({text for texts in together for text in texts}) > 4
    assert sampler(model, seed=1).complete(PROMPTS, 3, 1.0) != together


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 0.0, 1.0]]).expand(20_000, 3)
    generator = torch.Generator().manual_seed(0)
    drawn = draw(logits, 0.5, torch.rand(20_000, generator=generator))
    shares = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(-1), atol=0.015, rtol=0)
    assert draw(logits, 0.0, torch.zeros(20_000)).unique().tolist() == [0]
    assert draw(logits[:1], 1.0, torch.ones(1)).tolist() == [2], "no token beyond the vocabulary"


@pytest.mark.parametrize(
    ("task", "completion", "expected"),
    [
        ("functions", "\n    return x\n\ndef g():", "\n    return x\n\n"),
        ("functions", "\n    return x\n# end", "\n    return x\n"),
        ("functions", "\n    if x:\n\n        y()\n", "\n    if x:\n\n        y()\n"),
        ("translation", " Le fichier\nEnglish: next", " Le fichier\n"),
    ],
)
def test_a_completion_ends_with_its_function_or_line(model, task, completion, expected):
    ids = tokenizer_of()(completion)["input_ids"]
    found = Sampler(model, tokenizer_of(), STOPS[task], 24).text(ids)
    assert found == expected


def test_the_end_token_ends_a_completion(model):
    tokenizer = tokenizer_of()
    ids = [*tokenizer("return x")["input_ids"], tokenizer.eos_token_id]
    assert sampler(model)._has_ended(ids) and sampler(model).text(ids) == "return x"
