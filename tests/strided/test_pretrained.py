"""A pretrained model on real text: every number of a step, and gradients, against the naive oracle, in float32."""

import inspect
import textwrap

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.strided.test_exactness import exact
from tests.structured.conftest import lora

pytestmark = pytest.mark.slow
OPTIONS = {"stride": 6, "context_length": 5, "generate_max_len": 4, "n_samples_per_prompt": 2,
           "min_completion_prefix": 1}  # fmt: skip
OPTIONS |= {"feature_layers": [0.25, 0.5, 0.75]}


@pytest.fixture
def model(smollm2_dir):
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert model.dtype == torch.float32
    return model


@pytest.fixture(scope="module")
def batch(smollm2_dir):
    """Three rows of unequal lengths: source code, a question with its answer, and a short sentence."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    encode = lambda text: tokenizer(text)["input_ids"]
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    prompt = encode(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
    answer = encode("2 + 2 is 4, and no less than that.<|im_end|>")
    source = encode(inspect.getsource(textwrap.dedent))[:24]
    texts = [source, prompt + answer, encode("The capital of France is Paris, of course.")]
    lengths, prompts = [len(ids) for ids in texts], [0, len(prompt), 0]
    width = max(lengths)
    input_ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in texts])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels = input_ids.masked_fill(~mask, -100)
    labels[1, : prompts[1]] = -100
    rows = [(ids[:length], p, range(max(p, 1), length)) for ids, length, p in zip(input_ids, lengths, prompts)]
    inputs = {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}
    return {**inputs, "prompt_length": torch.tensor(prompts)}, rows


def test_with_lora_and_whitening(model, batch, tmp_path):
    out = exact(tmp_path, lora(model), batch, **OPTIONS, use_whitening=True)
    assert out.block_mask.sum(1).tolist() == [3, 3, 1]
