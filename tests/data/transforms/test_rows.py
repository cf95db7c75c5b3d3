"""Prompts that are continued as plain text have the same tokens in every mode."""

import copy

import pytest
from tokenizers.processors import TemplateProcessing

from ebft.data.conversation import Renderer
from ebft.data.preferences import PreferenceRow
from ebft.data.transforms.rows import continued_ids
from tests.data.conftest import config_of, tokenised
from tests.data.space_tokenizers import SCHEMES, space_tokenizer


def adding(tokenizer, before, after=()):
    """The tokenizer, with these special tokens before and after every text."""
    tokenizer = copy.deepcopy(tokenizer)
    tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in (*before, *after)]
    form = " ".join([*before, "$A", *after])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(form, special_tokens=tokens)
    return tokenizer


def ids_of(tokenizer, type, row, **entry):
    (found,) = tokenised(tokenizer, type, row, entry=entry)
    return found["input_ids"], found["prompt_length"]


def preference(tokenizer, prompt, method="dpo", reply="y"):
    """The ids of the prompt and of the first completion."""
    completions = {"chosen": reply, "rejected": "z"} if method == "dpo" else {"completion": reply, "label": True}
    config = config_of("passthrough", rl=method, sequence_len=64, micro_batch_size=2)
    row = PreferenceRow(config, tokenizer)({"prompt": prompt, **completions})
    return row["prompt_ids"], row["chosen_ids" if method == "dpo" else "completion_ids"]


@pytest.mark.parametrize("also_ends", [False, True], ids=["begins texts", "also ends texts"])
@pytest.mark.parametrize(("prompt", "ends"), [("x = 1", 0), ("x = 1<|end|>", 1), ("<|end|><|end|>", 2)])
def test_an_end_in_the_prompt_is_kept(tokenizer, also_ends, prompt, ends):
    tokenizer = adding(tokenizer, ["<|begin|>"], ["<|end|>"]) if also_ends else tokenizer
    text = prompt.removesuffix("<|end|>" * ends)
    plain = tokenizer(text, add_special_tokens=False).input_ids
    expected = [tokenizer.bos_token_id, *plain, *[tokenizer.eos_token_id] * ends]
    assert continued_ids(tokenizer, prompt) == expected == Renderer(tokenizer).prompt_ids(prompt)
    assert preference(tokenizer, prompt)[0] == expected
    formatted = {"format": "{instruction}" + "<|end|>" * ends}
    given = {"user_defined": formatted}
    for type, asked, entry in (("ebft_strided_structured.transform", prompt, {}), ("user_defined", text, given)):
        ids, length = ids_of(tokenizer, type, {"instruction": asked, "output": "y"}, **entry)
        assert ids[:length] == expected


@pytest.mark.parametrize("added", [["<|begin|>"], ["<|begin|>", "<|end|>"]], ids=["bos", "two tokens, as ChatGLM"])
def test_a_text_that_starts_with_bos_gets_no_second_one(tokenizer, added):
    tokenizer = adding(tokenizer, added)
    expected = [*map(tokenizer.convert_tokens_to_ids, added), *tokenizer("x = 1", add_special_tokens=False).input_ids]
    answer = [*tokenizer("y", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    for text in ("x = 1", f"{''.join(added)}x = 1"):
        for type, row, ids in (
            ("ebft_pretrain.transform", {"text": text}, expected),
            ("completion", {"text": text}, [*expected, tokenizer.eos_token_id]),
            ("ebft_strided_structured.transform", {"input": text, "output": "y"}, [*expected, *answer]),
            ({"format": "{instruction}"}, {"instruction": text, "output": "y"}, [*expected, *answer]),
        ):
            assert ids_of(tokenizer, type, row)[0] == ids, type
        assert Renderer(tokenizer).prompt_ids(text) == expected
        assert Renderer(tokenizer).of_row({"prompt": text, "ground_truth": "y"}).prompt_ids == expected
        for method in ("dpo", "kto"):
            assert preference(tokenizer, text, method) == (expected, answer)


def test_special_tokens_of_the_user_are_kept(tokenizer):
    """Only the addition of the tokenizer is left out: what the text says is in the row."""
    bos, plain = tokenizer.bos_token_id, tokenizer("x", add_special_tokens=False).input_ids
    rows = [{"text": text} for text in ("x<|begin|>x", "<|begin|><|begin|>x", "<|end|>x")]
    found = tokenised(tokenizer, "ebft_pretrain.transform", *rows)["input_ids"]
    assert list(found) == [[bos, *plain, bos, *plain], [bos, bos, *plain], [bos, tokenizer.eos_token_id, *plain]]
    without = copy.deepcopy(tokenizer)
    without.backend_tokenizer.post_processor = space_tokenizer("first").backend_tokenizer.post_processor
    assert without("x").input_ids == plain
    assert ids_of(without, "ebft_pretrain.transform", rows[1])[0] == [bos, bos, *plain]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokenizers_that_add_a_space(scheme):
    tokenizer = space_tokenizer(scheme)
    ids, length = ids_of(tokenizer, "ebft_strided_structured", {"input": "b\n", "output": "c b"})
    assert tokenizer.convert_ids_to_tokens(ids[length:]) == ["c", "▁b", "</s>"]
    assert preference(tokenizer, "b\n", reply="c b") == (ids[:length], ids[length:])
    for prompt, truth, words in (("b\n", "c b", ["c", "▁b"]), ("b", " c", ["▁c"])):
        found = Renderer(tokenizer).of_row({"prompt": prompt, "ground_truth": truth})
        assert tokenizer.convert_ids_to_tokens(found.reference_ids) == words
    tokenizer = adding(tokenizer, ["<s>"])
    ids = tokenizer("<s>Hi", add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1 and continued_ids(tokenizer, "<s>Hi") == ids
