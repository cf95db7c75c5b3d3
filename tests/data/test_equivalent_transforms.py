"""One dataset for every method: equivalent transforms train on the same tokens and hold the same rows out."""

import warnings

import pytest

from ebft.config.schema import RunConfig
from ebft.data.conversation import Renderer
from ebft.data.load import load_datasets
from ebft.data.prompts import load_prompts
from ebft.data.transforms import TRANSFORMS

METHODS = {
    "plain": {},
    "strided": {"rl": "ebft", "ebft": {"mode": "strided", "context_length": 4, "generate_max_len": 2}},
    "structured": {"rl": "ebft"},
    "grpo": {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}},
}


def chat(number):
    turns = [("user", f"question {number}"), ("assistant", "an answer")] * 2
    turns[-1] = ("assistant", f"<think>well {number}</think>the last answer")
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def pair(number):
    return {"input": f"question {number}", "output": f"the answer {number}"}


def instruction(number):
    return {"instruction": f"question {number}", "input": "given" * (number % 2), "output": f"the answer {number}"}


MAKE = {
    "ebft_strided_structured": pair,
    "ebft_opencode": pair,
    "alpaca": instruction,
    "alpaca_chat": instruction,
    "user_defined": instruction,
}


def load(path, type, tokenizer, method, **keys):
    """(prompt ids, reference ids) of every training row and of every held-out row, ends of turn left out."""
    values = {
        "base_model": "unused",
        "sequence_len": 300,
        "datasets": [{"path": str(path), "type": type}],
        **METHODS[method],
        **keys,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RunConfig.from_dict(values)
    renderer = Renderer(tokenizer)
    if config.method.rows == "prompts":
        parts = load_prompts(config, tokenizer)
        talks = [[renderer.of_row(row) for row in rows or []] for rows in parts]
        return [[(talk.prompt_ids, talk.turns[0].reference_ids) for talk in part] for part in talks]
    parts = load_datasets(config, tokenizer)
    cut = lambda row: (row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :])
    return [[cut(row) for row in rows or []] for rows in parts]


def same(tokens, prompts):
    """Whether rows of tokens are the rows of prompts, each reference followed by its end of turn."""
    return len(tokens) == len(prompts) and all(
        prompt == other and reference[: len(wanted)] == wanted and len(reference) > len(wanted)
        for (prompt, reference), (other, wanted) in zip(tokens, prompts)
    )


@pytest.mark.parametrize(
    "type", [name for name, found in TRANSFORMS.items() if found.twin and TRANSFORMS[found.twin].twin == name]
)
def test_all_methods_train_on_the_same_tokens(write_jsonl, chatml, type):
    make = MAKE.get(type.split(".")[0], chat)
    path = write_jsonl([make(number) for number in range(10)])
    rows = {method: load(path, type, chatml, method, val_set_size=3, seed=1) for method in METHODS}
    assert rows["plain"] == rows["strided"] and rows["structured"] == rows["grpo"]
    train, held_out = rows["structured"]
    turns = 2 if "all_turns" in type else 1
    assert len(train) == 7 * turns and len(held_out) == 3 * turns
    assert same(rows["plain"][0], train) and same(rows["plain"][1], held_out)


@pytest.mark.parametrize("type", ["chat_template", "ebft_strided_chat"])
@pytest.mark.parametrize("method", ["plain", "strided"])
def test_every_turn_is_trained_on_in_both_kinds_of_rows(write_jsonl, chatml, type, method):
    path = write_jsonl([chat(number) for number in range(4)])
    prompts = load(path, type, chatml, "grpo", val_set_size=2)
    tokens = load(path, type, chatml, method, val_set_size=2)
    assert [len(part) for part in prompts] == [4, 4] and [len(part) for part in tokens] == [2, 2]
    for of_prompts, of_tokens in zip(prompts, tokens):
        last = {tuple(prompt) for prompt, _ in of_tokens}
        assert last == {tuple(prompt) for prompt, _ in of_prompts} & last and len(last) == 2


def test_the_template_is_for_chats_only(write_jsonl, tokenizer):
    """Text that is continued needs no chat template in any method."""
    assert tokenizer.chat_template is None
    path = write_jsonl([pair(number) for number in range(3)])
    for method in METHODS:
        assert len(load(path, "ebft_strided_structured.transform", tokenizer, method)[0]) == 3


def test_train_on_inputs_labels_the_prompt_in_plain_fine_tuning(write_jsonl, tokenizer):
    path = write_jsonl([pair(0)])
    for train_on_inputs in (False, True):
        values = {"base_model": "unused", "train_on_inputs": train_on_inputs}
        entry = {"path": str(path), "type": "ebft_strided_structured.transform"}
        row = load_datasets(RunConfig.from_dict({**values, "datasets": [entry]}), tokenizer)[0][0]
        masked = 0 if train_on_inputs else row["prompt_length"]
        assert row["labels"] == [-100] * masked + row["input_ids"][masked:]
