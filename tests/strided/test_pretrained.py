"""A pretrained model on real text: every number of a step, and gradients, against the naive oracle, in float32."""

import copy
import inspect
import textwrap

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.strided.test_exactness import compare, make_trainer, with_lora

pytestmark = pytest.mark.slow
TRAINED_IN_FULL = ("model.embed_tokens.", "model.layers.0.", "model.layers.17.", "model.norm.")  # the head is tied
OPTIONS = {
    "stride": 6,
    "context_length": 5,
    "generate_max_len": 4,
    "n_samples_per_prompt": 2,
    "min_completion_prefix": 1,
    "feature_layers": [0.25, 0.5, 0.75],
}


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
    texts = [
        encode(inspect.getsource(textwrap.dedent))[:24],
        prompt + encode("2 + 2 is 4, and no less than that.<|im_end|>"),
        encode("The capital of France is Paris, of course."),
    ]
    prompts = [0, len(prompt), 0]
    width = max(len(ids) for ids in texts)
    input_ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in texts])
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in texts])[:, None]
    labels = input_ids.masked_fill(~mask, -100)
    labels[1, : prompts[1]] = -100
    rows = [
        (input_ids[row, : len(ids)], prompts[row], range(max(prompts[row], 1), len(ids)))
        for row, ids in enumerate(texts)
    ]
    inputs = {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": labels,
        "prompt_length": torch.tensor(prompts),
    }
    return inputs, rows


def test_with_lora_and_whitening(model, batch, tmp_path):
    model = with_lora(model)
    plain = copy.deepcopy(model)
    trainer = make_trainer(model, tmp_path, **OPTIONS, use_whitening=True)
    out = compare(trainer, plain, *batch)
    assert out.block_mask.sum(1).tolist() == [3, 2, 1]


def test_full_weights(model, batch, tmp_path):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED_IN_FULL))
    plain = copy.deepcopy(model)
    trainer = make_trainer(model, tmp_path, **OPTIONS, embed_method="mean_pooling", temperature=1.0)
    compare(trainer, plain, *batch)
