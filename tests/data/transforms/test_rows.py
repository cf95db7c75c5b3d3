"""Prompts that are continued as plain text have the same tokens in every mode."""

import copy

import pytest
from datasets import Dataset

from ebft.config.schema import RunConfig
from ebft.data.apply import tokenise
from ebft.data.conversation import Renderer
from ebft.data.preferences import PreferenceRow
from ebft.data.transforms.rows import continued_ids
from tests.data.space_tokenizers import SCHEMES, space_tokenizer


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


def starting_with(tokenizer, *names):
    """The tokenizer, with these special tokens before every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer)
    tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{' '.join(names)} $A", special_tokens=tokens)
    return tokenizer


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
    row = PreferenceRow(config, some_tokenizer)({"prompt": prompt, "chosen": "y", "rejected": "z"})
    assert row["prompt_ids"] == expected


def preference_row(tokenizer, row, method="dpo", type="passthrough"):
    values = {
        "base_model": "x",
        "rl": method,
        "datasets": [{"path": "x", "type": type}],
        "sequence_len": 64,
        "micro_batch_size": 2,
    }
    config = RunConfig.from_dict(values)
    return PreferenceRow(config, tokenizer)(row)


@pytest.mark.parametrize(
    ("start", "added"),
    [("<|begin|>", ["<|begin|>"]), ("<|begin|><|end|>", ["<|begin|>", "<|end|>"])],
    ids=["bos", "two tokens, as ChatGLM"],
)
def test_a_text_that_starts_with_bos_gets_no_second_one(tokenizer, make_config, start, added):
    tokenizer = starting_with(tokenizer, *added)
    expected = [*map(tokenizer.convert_tokens_to_ids, added), *tokenizer("x = 1", add_special_tokens=False).input_ids]
    answer = [*tokenizer("y", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    for text in ("x = 1", f"{start}x = 1"):
        for kind, row, ids in (
            ("ebft_pretrain.transform", {"text": text}, expected),
            ("completion", {"text": text}, [*expected, tokenizer.eos_token_id]),
            ("ebft_strided_structured.transform", {"input": text, "output": "y"}, [*expected, *answer]),
            ("user_defined", {"instruction": text, "output": "y"}, [*expected, *answer]),
        ):
            entry = {"user_defined": {"format": "{instruction}"}} if kind == "user_defined" else {}
            config = make_config("unused", kind, entry=entry)
            found = tokenise(Dataset.from_list([row]), config.datasets[0], config, tokenizer)[0]
            assert found["input_ids"] == ids, kind
        assert Renderer(tokenizer).prompt_ids(text) == expected
        assert Renderer(tokenizer).conversation(text, "y").prompt_ids == expected
        for method, completions in (
            ("dpo", {"chosen": "y", "rejected": "z"}),
            ("kto", {"completion": "y", "label": True}),
        ):
            found = preference_row(tokenizer, {"prompt": text, **completions}, method)
            assert found["prompt_ids"] == expected
            assert (found["chosen_ids"] if method == "dpo" else found["completion_ids"]) == answer


def test_special_tokens_of_the_user_are_kept(tokenizer, make_config):
    """Only the addition of the tokenizer is left out: what the text says is in the row."""
    config = make_config("unused", "ebft_pretrain.transform")
    bos, plain = tokenizer.bos_token_id, tokenizer("x", add_special_tokens=False).input_ids
    rows = Dataset.from_list([{"text": text} for text in ("x<|begin|>x", "<|begin|><|begin|>x", "<|end|>x")])
    found = tokenise(rows, config.datasets[0], config, tokenizer)["input_ids"]
    assert list(found) == [[bos, *plain, bos, *plain], [bos, bos, *plain], [bos, tokenizer.eos_token_id, *plain]]
    without = copy.deepcopy(tokenizer)
    without.backend_tokenizer.post_processor = space_tokenizer("first").backend_tokenizer.post_processor
    assert without("x").input_ids == plain
    assert tokenise(rows, config.datasets[0], config, without)["input_ids"][1] == [bos, bos, *plain]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bos_before_a_space_that_the_tokenizer_adds(scheme):
    tokenizer = starting_with(space_tokenizer(scheme), "<s>")
    ids = tokenizer("<s>Hi", add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert continued_ids(tokenizer, "<s>Hi") == ids


def test_an_end_that_the_text_has_is_not_added_again(some_tokenizer, make_config):
    config = make_config("unused", "ebft_pretrain.transform")
    bos, eos = some_tokenizer.bos_token_id, some_tokenizer.eos_token_id
    row = tokenise(Dataset.from_list([{"text": "<|begin|>x<|end|>"}]), config.datasets[0], config, some_tokenizer)[0]
    assert row["input_ids"] == [bos, *some_tokenizer("x", add_special_tokens=False).input_ids, eos]


def test_an_empty_prompt_before_a_text_with_bos(tokenizer, make_config):
    """The row starts with the tokens of the prompt, BOS alone."""
    config = make_config("unused", "ebft_strided_structured.transform")
    rows = Dataset.from_list([{"input": "", "output": text} for text in ("y", "<|begin|>y")])
    plain, with_bos = tokenise(rows, config.datasets[0], config, tokenizer)
    assert with_bos["input_ids"] == plain["input_ids"] and with_bos["labels"] == plain["labels"]
