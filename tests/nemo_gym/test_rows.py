"""Rows of NeMo Gym: prompts, routes and the unchanged line."""

import json

import pytest

from ebft.data.prompts import load_prompt_rows
from ebft.errors import DataError
from tests.nemo_gym.servers import config_of, row
from tests.structured.conftest import make_chat_tokenizer


@pytest.fixture
def load():
    """`load(*datasets, **keys)`: the rows, in the order of their files, for a model whose chats show calls of tools."""
    tokenizer, content = make_chat_tokenizer(), "{{ message.content }}"
    shown = content + "{{ message.tool_calls or '' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(content, shown)
    config = lambda *datasets, **keys: config_of(*datasets, shuffle_merged_datasets=False, **keys)
    return lambda *datasets, **keys: load_prompt_rows(config(*datasets, **keys), tokenizer)[:2]


def test_routes_per_row_and_per_file(write_rows, load):
    own = write_rows([row("a", agent_ref={"type": "responses_api_agents", "name": "math"}), row("b")], "one.jsonl")
    other = write_rows([row("c")], "two.jsonl")
    entries = {"path": str(own), "server_name": "default"}, {"path": other.name, "server_name": "length"}
    rows, _ = load(*entries, nemo_gym_dir=str(other.parent))
    assert rows["nemo_gym_server"][:] == ["math", "default", "length"]
    assert [prompt[-1]["content"] for prompt in rows["prompt"]] == ["a", "b", "c"]


def test_nested_values_of_any_shape_stay_as_they_are(write_rows, load):
    given = [row("a", meta={"x": None, "y": [1, "two", {"z": []}]}, id=7), row("c", created="2024-05-01")]
    given += [row("b", meta=[{"other": {"deep": [None]}}], id="seven")]
    rows, _ = load({"path": str(write_rows(given)), "server_name": "s"})
    assert [json.dumps(json.loads(line)) for line in rows["nemo_gym_row"]] == [json.dumps(line) for line in given]


def test_all_messages_are_the_prompt(write_rows, load):
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    items = [{"role": "user", "content": "one", "type": "message"}]
    items += [{"role": "assistant", "content": [{"type": "output_text", "text": "two", "annotations": []}]}]
    items += [{"type": "reasoning", "id": "r", "summary": []}, call]
    items += [{"type": "function_call_output", "call_id": "1", "output": "three"}, {"role": "user", "content": "four"}]
    given = [{"responses_create_params": {"input": items, "instructions": "Be brief."}}]
    given += [{"responses_create_params": {"input": "plain text"}}]
    path = write_rows(given)
    datasets = [{"path": str(path), "type": "chat_template", "field_messages": "responses_create_params.input"}]
    rows, _ = load({"path": str(path), "server_name": "s"}, datasets=datasets)
    first, second = rows["prompt"][:]
    assert [message["role"] for message in first] == ["system", "user", "assistant", "assistant", "tool", "user"]
    contents = [message["content"] for message in first if message.get("content")]
    assert contents == ["Be brief.", "one", "two", "three", "four"]
    assert [(message["role"], message["content"]) for message in second] == [("user", "plain text")]


@pytest.mark.parametrize(("item", "message"), [
    ({"type": "computer_call"}, "not a supported message"), ({"role": "user", "content": [{"image": 1}]}, "not text"),
])  # fmt: skip
def test_items_that_would_be_left_out_are_refused(write_rows, load, item, message):
    path = write_rows([{"responses_create_params": {"input": [item]}}])
    with pytest.raises(DataError, match=message):
        load({"path": str(path), "server_name": "s"})
    with pytest.raises(DataError, match="row 0: the row has no agent_ref with a name.*Set server_name"):
        load({"path": str(write_rows([row("a")]))})


@pytest.mark.parametrize("listed", [False, True])
def test_the_first_rows_of_a_file(write_rows, load, listed):
    own, other = (write_rows([row(f"{name}{n}") for n in range(4)], f"{name}.jsonl") for name in "ab")
    datasets = [{"path": str(path), "type": "nemo_gym.transform"} for path in (own, other)]
    entries = {"path": str(own), "server_name": "s", "max_samples": 2}, {"path": str(other), "server_name": "s"}
    rows, _ = load(*entries, **({"datasets": datasets} if listed else {}))
    assert [prompt[-1]["content"] for prompt in rows["prompt"]] == ["a0", "a1", "b0", "b1", "b2", "b3"]
