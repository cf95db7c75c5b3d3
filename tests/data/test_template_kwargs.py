"""`chat_template_kwargs` of the config, of a dataset and of a row reach the chat template in every method."""

import json
import warnings

import pytest

from ebft.data.conversation import Renderer
from ebft.data.load import load_token_rows
from ebft.data.preferences import load_preference_rows
from ebft.data.prompts import load_prompt_rows
from ebft.data.reward_rows import load_comparisons
from ebft.run.config.schema import RunConfig
from tests.data.conftest import assistant, config_of, user

CHAT = [user("how?"), assistant("fine")]
ROW = {"messages": CHAT, "chosen": CHAT, "rejected": [CHAT[0], assistant("bad")]}


def of_prompts(config, tokenizer):
    talk = Renderer(tokenizer, config.chat_template_kwargs).of_row(load_prompt_rows(config, tokenizer)[0][0])
    return talk.prompt_ids + talk.reference_ids


METHODS = {  # keys, type, the ids of the first row
    "sft": ({}, "chat_template", lambda *given: load_token_rows(*given)[0][0]["input_ids"]),
    "strided": (
        {"rl": "ebft", "ebft": {"mode": "strided", "context_length": 2, "generate_max_len": 1}},
        "ebft_strided_chat.transform",
        lambda *given: load_token_rows(*given)[0][0]["input_ids"],
    ),
    "structured": ({"rl": "ebft"}, "ebft_chat_multiturn.transform_last_turn", of_prompts),
    "dpo": (
        {"rl": "dpo"},
        "chat_template.argilla_chat",
        lambda *given: load_preference_rows(*given).train[0]["prompt_ids"],
    ),
    "reward model": (
        {"reward_model": True},
        "bradley_terry.chat_template",
        lambda *given: load_comparisons(*given).train[0]["chosen_ids"],
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_row_comes_before_the_dataset_and_the_config(write_jsonl, chatml, method):
    chatml.chat_template = "{{ '<' ~ (mode or '') ~ '>' }}" + chatml.chat_template
    keys, type, ids_of = METHODS[method]

    def shown(row=None, entry=None, **given):
        path = write_jsonl([ROW | ({} if row is None else {"chat_template_kwargs": row})] * 2)
        with warnings.catch_warnings(action="ignore"):
            config = config_of(type, {"chat_template_kwargs": entry} if entry else {}, path, **keys, **given)
        return chatml.decode(ids_of(config, chatml)).partition(">")[0]

    config = {"chat_template_kwargs": {"mode": "config"}}
    assert shown() == "<"
    assert shown(**config) == "<config"
    assert shown(entry={"mode": "entry"}, **config) == "<entry"
    assert shown({"mode": "row"}, {"mode": "entry"}, **config) == "<row"
    assert shown(json.dumps({"mode": "row"}), {"mode": "entry"}) == "<row"
    assert shown({"mode": None}, {"mode": "entry"}) == "<entry"
    if method == "structured":
        assert shown(trl={"chat_template_kwargs": {"mode": "trl"}}) == "<trl"


def test_arguments_of_all_datasets_are_those_of_the_run():
    def found(*given, **keys):
        datasets = [{"path": "p", "type": "chat_template", "chat_template_kwargs": kwargs} for kwargs in given]
        return RunConfig.from_dict({"base_model": "m", "datasets": datasets, **keys}).chat_template_kwargs

    assert found({"a": 1}, {"a": 1}) == {"a": 1}
    assert found({"a": 1}, {"a": 2}) is None and found({"a": 1}, None) is None
    assert found({"a": 1}, chat_template_kwargs={"a": 2}) == {"a": 2}
    two = {"chat_template_kwargs": {"a": 1}, "trl": {"chat_template_kwargs": {"a": 2}}}
    with pytest.raises(ValueError, match="chat_template_kwargs and trl.chat_template_kwargs differ"):
        config_of("ebft_opencode.transform", rl="ebft", **two)
