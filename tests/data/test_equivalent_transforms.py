"""One dataset for every method: equivalent transforms train on the same tokens and hold the same rows out."""

import warnings

import pytest

from ebft.data.conversation import Renderer
from ebft.data.load import load_token_rows
from ebft.data.prompts import load_prompt_rows
from ebft.data.transforms import TRANSFORMS
from tests.data.conftest import assistant, config_of, user
from tests.data.test_inventory import METHODS

TRAINED = ("sft", "strided", "structured", "grpo")


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
        parts = load_prompt_rows(config, tokenizer)[:2]
        talks = [[Renderer(tokenizer).of_row(row) for row in rows or []] for rows in parts]
        return [[(talk.prompt_ids, talk.turns[0].reference_ids) for talk in part] for part in talks]
    cut = lambda row: (row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :])
    return [[cut(row) for row in rows or []] for rows in load_token_rows(config, tokenizer)[:2]]


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
def test_all_methods_train_on_the_same_tokens(write_jsonl, tokenizer, chatml, type):
    chatml = tokenizer if type.startswith("ebft_strided_structured") else chatml  # text needs no chat template
    path = write_jsonl([MAKE.get(type.split(".")[0], chat)(number) for number in range(10)])
    rows = {method: load(path, type, chatml, method, val_set_size=3, seed=1) for method in TRAINED}
    assert rows["sft"] == rows["strided"] and rows["structured"] == rows["grpo"]
    train, held_out = rows["structured"]
    turns = 2 if "all_turns" in type else 1
    assert len(train) == 7 * turns and len(held_out) == 3 * turns
    assert same(rows["sft"][0], train) and same(rows["sft"][1], held_out)
