"""One dataset for every method: equivalent transforms train on the same tokens and hold the same rows out."""

import warnings

import pytest

from ebft.data.conversation import Renderer
from ebft.data.load import load_datasets
from ebft.data.prompts import load_prompts
from ebft.data.transforms import TRANSFORMS
from tests.data.conftest import assistant, config_of, user

METHODS = {
    "plain": {},
    "strided": {"rl": "ebft", "ebft": {"mode": "strided", "context_length": 4, "generate_max_len": 2}},
    "structured": {"rl": "ebft"},
    "grpo": {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}},
}


def chat(number):
    last = assistant(f"<think>well {number}</think>the last answer")
    return {"messages": [user(f"question {number}"), assistant("an answer"), user(f"question {number}"), last]}


def pair(number):
    return {"input": f"question {number}", "output": f"the answer {number}"}


def instruction(number):
    return {"instruction": f"question {number}", "input": "given" * (number % 2), "output": f"the answer {number}"}


MAKE = {"ebft_strided_structured": pair, "ebft_opencode": pair}
MAKE |= dict.fromkeys(("alpaca", "alpaca_chat", "user_defined"), instruction)


def load(path, type, tokenizer, method, **keys):
    """(prompt ids, reference ids) of every training row and of every held-out row, ends of turn left out."""
    with warnings.catch_warnings(action="ignore"):
        config = config_of(type, path=path, sequence_len=300, **METHODS[method], **keys)
    if config.method.rows == "prompts":
        talks = [[Renderer(tokenizer).of_row(row) for row in rows or []] for rows in load_prompts(config, tokenizer)]
        return [[(talk.prompt_ids, talk.turns[0].reference_ids) for talk in part] for part in talks]
    cut = lambda row: (row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :])
    return [[cut(row) for row in rows or []] for rows in load_datasets(config, tokenizer)]


def same(tokens, prompts):
    """Whether rows of tokens are the rows of prompts, each reference followed by its end of turn."""
    return len(tokens) == len(prompts) and all(
        prompt == other and reference[: len(wanted)] == wanted and len(reference) > len(wanted)
        for (prompt, reference), (other, wanted) in zip(tokens, prompts)
    )


@pytest.mark.first(6)
@pytest.mark.parametrize(
    "type", [name for name, found in TRANSFORMS.items() if found.twin and TRANSFORMS[found.twin].twin == name]
)
def test_all_methods_train_on_the_same_tokens(write_jsonl, chatml, type):
    path = write_jsonl([MAKE.get(type.split(".")[0], chat)(number) for number in range(10)])
    rows = {method: load(path, type, chatml, method, val_set_size=3, seed=1) for method in METHODS}
    assert rows["plain"] == rows["strided"] and rows["structured"] == rows["grpo"]
    train, held_out = rows["structured"]
    turns = 2 if "all_turns" in type else 1
    assert len(train) == 7 * turns and len(held_out) == 3 * turns
    assert same(rows["plain"][0], train) and same(rows["plain"][1], held_out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "type",
    [
        *("ebft_strided_structured.transform", "ebft_opencode.transform", "chat_template"),
        *("ebft_chat_multiturn.transform", "ebft_strided_chat.transform_all_turns"),
    ],
)
def test_rows_without_a_prompt_are_dropped_and_counted_by_all_methods(write_jsonl, chatml, capsys, type, method):
    """SFT and strided mode would train on them as text. A chat is dropped if nothing precedes its first answer."""
    empty = [pair(5) | {"input": None}, pair(6) | {"input": " \n"}]
    if type.split(".")[0] not in MAKE:
        empty = [{"messages": [user(None), assistant("a")]}, {"messages": [user(" \n"), *chat(6)["messages"][1:]]}]
    make = MAKE.get(type.split(".")[0], chat)
    path = write_jsonl([*map(make, range(2)), *empty, make(2)])
    rows = load(path, type, chatml, method)[0]
    dropped = f"{len(rows)} rows; dropped 2 without a prompt (for example {path}, train, row 2)"
    assert len(rows) >= 3 and f"5 documents produced {dropped}" in capsys.readouterr().err


@pytest.mark.parametrize("type", ["chat_template", "ebft_strided_chat"])
def test_every_turn_is_trained_on_in_both_kinds_of_rows(write_jsonl, chatml, type):
    path = write_jsonl([chat(number) for number in range(4)])
    prompts = load(path, type, chatml, "grpo", val_set_size=2)
    assert list(map(len, prompts)) == [4, 4]
    for method in ("plain", "strided"):
        tokens = load(path, type, chatml, method, val_set_size=2)
        for of_prompts, of_tokens in zip(prompts, tokens, strict=True):
            last = {tuple(prompt) for prompt, _ in of_tokens}
            assert len(of_tokens) == len(last) == 2 and last <= {tuple(prompt) for prompt, _ in of_prompts}


def test_text_that_is_continued_needs_no_chat_template(write_jsonl, tokenizer):
    assert tokenizer.chat_template is None
    path = write_jsonl([pair(number) for number in range(3)])
    for method in METHODS:
        assert len(load(path, "ebft_strided_structured.transform", tokenizer, method)[0]) == 3
