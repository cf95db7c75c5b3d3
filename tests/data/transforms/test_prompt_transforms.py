"""Rows of the built-in transforms for structured mode, written out by hand."""

import pytest

from ebft.data.apply import ConfigView
from ebft.data.transforms import find_transform
from ebft.errors import DataError


@pytest.fixture
def run(make_config, chatml):
    def run(type, row, field=None):
        config = make_config("unused", type, entry={"field": field}, ebft={"mode": "structured"})
        transform_fn, map_kwargs = find_transform(type)(ConfigView(config), dataset=config.datasets[0])
        assert map_kwargs["remove_columns"] == "__all__"
        if map_kwargs.get("batched"):
            row = {column: [value] for column, value in row.items()}
        return transform_fn(row, tokenizer=chatml)

    return run


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


SYSTEM = {"role": "system", "content": "Be kind."}
GREETED = [SYSTEM, assistant("Welcome."), user("Hi"), assistant("Hello"), user("2+2?"), assistant("4"), user("Bye")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"input": "Add 1 2", "output": "3", "id": 7}, "Add 1 2"),
        ({"question": "Add 1 2", "answer": "3"}, "Add 1 2"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
    ],
)
def test_opencode(run, row, prompt):
    assert run("ebft_opencode.transform", row) == {"prompt": [user(prompt)], "ground_truth": "3"}


def test_opencode_names_the_known_pairs(run):
    with pytest.raises(DataError, match="supported pairs are input/output, .* the row has text"):
        run("ebft_opencode.transform", {"text": "a"})


def test_multiturn_first_answer_and_what_follows(run):
    assert run("ebft_chat_multiturn.transform", {"messages": GREETED}) == {
        "prompt": GREETED[:3],
        "ground_truth": "Hello",
        "remaining_turns": [user("2+2?"), assistant("4")],
    }


def test_multiturn_of_one_answer(run):
    row = {"chat": [user("Hi"), assistant("Hello"), user("Bye")]}
    expected = {"prompt": [user("Hi")], "ground_truth": "Hello", "remaining_turns": []}
    assert run("ebft_chat_multiturn.transform", row, field="chat") == expected


def test_multiturn_skips_a_turn_that_only_calls_a_tool(run):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "name": None}
    chat = [user("2+2?"), call, {"role": "tool", "content": "4"}, assistant("It is 4.")]
    row = run("ebft_chat_multiturn.transform", {"messages": chat})
    assert row["ground_truth"] == "It is 4."
    assert row["prompt"] == [chat[0], {"role": "assistant", "tool_calls": [{"name": "add"}]}, chat[2]]


def test_multiturn_last_turn(run):
    assert run("ebft_chat_multiturn.transform_last_turn", {"messages": GREETED}) == {
        "prompt": GREETED[:5],
        "ground_truth": "4",
    }


def test_multiturn_all_turns(run):
    assert run("ebft_chat_multiturn.transform_all_turns", {"messages": GREETED, "id": 3}) == {
        "prompt": [GREETED[:3], GREETED[:5]],
        "ground_truth": ["Hello", "4"],
    }


@pytest.mark.parametrize("chat", [[user("Hi")], [assistant("Welcome.")], [SYSTEM, assistant("Welcome.")], [], None])
@pytest.mark.parametrize("function", ["transform", "transform_last_turn"])
def test_a_chat_without_an_answer_is_all_prompt(run, function, chat):
    row = run(f"ebft_chat_multiturn.{function}", {"messages": chat})
    assert row["prompt"] == (chat or []) and row["ground_truth"] is None
    assert row.get("remaining_turns", []) == []


def test_all_turns_of_a_chat_without_an_answer(run):
    row = run("ebft_chat_multiturn.transform_all_turns", {"messages": [user("Hi")]})
    assert row == {"prompt": [[user("Hi")]], "ground_truth": [None]}


def test_an_answer_in_parts(run):
    chat = [user("Hi"), assistant([{"type": "text", "text": "Hello"}, " you"])]
    assert run("ebft_chat_multiturn.transform_last_turn", {"messages": chat})["ground_truth"] == "Hello you"


@pytest.mark.parametrize("messages", ["Hi", [{"speaker": "human", "text": "Hi"}]])
def test_other_things_than_messages(run, messages):
    with pytest.raises(
        DataError, match=r"column 'messages' must contain a list of messages .*message_property_mappings"
    ):
        run("ebft_reasoning.transform", {"messages": messages})


EARLIER = assistant("<reasoning>warm up</reasoning>\n1")
PROMPT = [user("1+0?"), EARLIER, user("2+2?")]
THOUGHT = "<thinking> two and two </thinking>\n4"


@pytest.mark.parametrize(
    ("function", "reply", "ground_truth"),
    [
        ("transform", assistant(THOUGHT), THOUGHT),
        ("transform", assistant("4"), "4"),
        ("transform", assistant("4", reasoning_content="two"), "<think>\ntwo\n</think>\n\n4"),
        ("transform", assistant(THOUGHT, reasoning_content="two"), THOUGHT),
        ("transform_answer_only", assistant(THOUGHT), "4"),
        ("transform_answer_only", assistant("two</think>\n\n4"), "4"),
        ("transform_answer_only", assistant("<think>two 4"), "<think>two 4"),
        ("transform_answer_only", assistant("4", reasoning_content="two"), "4"),
    ],
)
def test_reasoning(run, function, reply, ground_truth):
    row = run(f"ebft_reasoning.{function}", {"messages": [*PROMPT, reply, user("Thanks")]})
    assert row == {"prompt": PROMPT, "ground_truth": ground_truth}


@pytest.mark.parametrize(
    ("reply", "ground_truth"),
    [
        (assistant(THOUGHT), "<think>\ntwo and two\n</think>\n\n4"),
        (assistant("two</think>4"), "<think>\ntwo\n</think>\n\n4"),
        (assistant("4", reasoning_content="two"), "<think>\ntwo\n</think>\n\n4"),
        (assistant("4"), "4"),
    ],
)
def test_reasoning_split_thinking(run, reply, ground_truth):
    row = run("ebft_reasoning.transform_split_thinking", {"messages": [*PROMPT, reply]})
    earlier = assistant("1", reasoning_content="warm up")
    assert row == {"prompt": [user("1+0?"), earlier, user("2+2?")], "ground_truth": ground_truth}


def test_reasoning_split_thinking_leaves_users_alone(run):
    tag = assistant("A tag.", reasoning_content="hm")
    chat = [user("What is <think>a</think>?"), tag, user("So?"), assistant("So.")]
    row = run("ebft_reasoning.transform_split_thinking", {"messages": chat})
    assert row["prompt"] == chat[:3]


def test_reasoning_without_an_answer(run):
    assert run("ebft_reasoning.transform", {"messages": [user("Hi")]}) == {"prompt": [user("Hi")], "ground_truth": None}
