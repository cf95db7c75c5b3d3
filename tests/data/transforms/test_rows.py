"""Prompts that are continued as plain text have the same tokens in every mode."""

import copy

import pytest
from datasets import Dataset

from ebft.config.schema import RunConfig
from ebft.data.conversation import Renderer
from ebft.data.preferences.rows import PreferenceRow
from ebft.data.tokenise import tokenise
from ebft.data.transforms.rows import continued_ids


@pytest.fixture(params=[False, True], ids=["begins texts", "also ends texts"])
def some_tokenizer(request, tokenizer):
    """The tokenizer, which puts BOS before every text, and one that also puts EOS after it."""
    if not request.param:
        return tokenizer
    from tokenizers.processors import TemplateProcessing

    changed = copy.deepcopy(tokenizer)
    tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|begin|>", "<|end|>")]
    changed.backend_tokenizer.post_processor = TemplateProcessing("<|begin|> $A <|end|>", special_tokens=tokens)
    assert changed("x").input_ids[-1] == changed.eos_token_id
    return changed


def strided_prompt(tokenizer, make_config, prompt, type="ebft_strided_structured.transform", **entry):
    rows = Dataset.from_list([{"instruction": prompt, "output": "y"}])
    config = make_config("unused", type, entry=entry)
    row = tokenise(rows, config.datasets[0], config, tokenizer)[0]
    return row["input_ids"][: row["prompt_length"]]


@pytest.mark.parametrize(("prompt", "ends"), [("x = 1", 0), ("x = 1<|end|>", 1), ("<|end|><|end|>", 2)])
def test_an_end_in_the_prompt_is_kept(some_tokenizer, make_config, prompt, ends):
    text = prompt.removesuffix("<|end|>" * ends)
    plain = some_tokenizer(text, add_special_tokens=False).input_ids
    expected = [some_tokenizer.bos_token_id, *plain, *[some_tokenizer.eos_token_id] * ends]
    assert continued_ids(some_tokenizer, prompt) == expected
    assert strided_prompt(some_tokenizer, make_config, prompt) == expected
    formatted = {"format": "{instruction}" + "<|end|>" * ends}
    assert strided_prompt(some_tokenizer, make_config, text, "user_defined", user_defined=formatted) == expected
    assert Renderer(some_tokenizer).prompt_ids(prompt) == expected
    config = RunConfig.from_dict(
        {"base_model": "x", "rl": "dpo", "datasets": [{"path": "x", "type": "chatml.intel"}], "sequence_len": 64}
    )
    row = PreferenceRow(config, some_tokenizer)({"prompt": prompt, "chosen": "y", "rejected": "z"}, "row 0")
    assert row["prompt_ids"] == expected
