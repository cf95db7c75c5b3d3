"""The whole way from a `datasets:` section to prompts and references, and what is said about the rows left out."""

import textwrap

import pytest

from ebft.data.prompts import load_prompts
from ebft.errors import DataError

OPENCODE = "ebft_opencode.transform"
MULTITURN = "ebft_chat_multiturn.transform"


@pytest.fixture
def make_structured(make_config):
    """As `make_config`, for structured mode, rows in their order."""

    def make(path, type=OPENCODE, **keys):
        defaults = {"ebft": {"mode": "structured"}, "shuffle_merged_datasets": False, "sequence_len": 200}
        return make_config(path, type, **{**defaults, **keys})

    return make


@pytest.fixture
def make_grpo(make_structured):
    return lambda path, type=OPENCODE, **keys: make_structured(path, type, rl="grpo", ebft=None, **keys)


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """The `type` of a transform of the user's own with the given result, in the working directory."""

    def write(result, map_kwargs='{"remove_columns": "__all__"}', suffix=""):
        name = f"own_prompts_{abs(hash(request.node.nodeid))}{suffix}"
        body = f"""
        def transform(cfg, *args, **kwargs):
            def transform_fn(example, tokenizer=None):
                return {result}
            return transform_fn, {map_kwargs}
        """
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        monkeypatch.chdir(tmp_path)
        return f"{name}.transform"

    return write


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def chat(*texts):
    return {"messages": [(assistant if index % 2 else user)(text) for index, text in enumerate(texts)]}


def test_rows(make_structured, write_jsonl, chatml, capsys):
    path = write_jsonl([{"input": "Add 1 2", "output": "3", "id": 1}, {"input": "Add 2 2", "output": "4", "id": 2}])
    train, evaluation = load_prompts(make_structured(path), chatml)
    assert evaluation is None and train.column_names == ["prompt", "ground_truth"]
    assert train[0] == {"prompt": [user("Add 1 2")], "ground_truth": "3"}
    assert train["ground_truth"][:] == ["3", "4"]
    assert "\ndatasets: 2 documents produced 2 rows\n" in capsys.readouterr().err


def test_remaining_turns_are_uniform(make_structured, write_jsonl, chatml):
    talk = write_jsonl([chat("Hi", "Hello", "2+2?", "4"), chat("Hi", "Hello")], "talk.jsonl")
    pairs = write_jsonl([{"input": "a", "output": "b"}], "pairs.jsonl")
    datasets = [{"path": str(pairs), "type": OPENCODE}, {"path": str(talk), "type": MULTITURN}]
    train, _ = load_prompts(make_structured(talk, datasets=datasets), chatml)
    assert train["remaining_turns"][:] == [[], [user("2+2?"), assistant("4")], []]


def test_what_is_dropped_is_counted(make_structured, write_jsonl, chatml, capsys):
    rows = [
        {"input": "Add 1 2", "output": "3"},
        {"input": None, "output": "3"},
        {"input": " ", "output": "3"},
        {"input": "Add", "output": None},
        {"input": "Add", "output": " \n"},
        {"input": "Add", "output": "<|end|>"},
        {"input": "Add", "output": "x " * 200},
    ]
    train, _ = load_prompts(make_structured(write_jsonl(rows)), chatml)
    assert len(train) == 1
    assert (
        "\ndatasets: 7 documents produced 1 row; dropped 2 without a prompt, 3 without a reference, "
        "1 whose prompt and reference do not fit within sequence_len (for example "
    ) in (said := capsys.readouterr().err)
    assert ", train, row 1)\n" in said


def count(tokenizer, text):
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_sequence_len_holds_the_whole_conversation(make_structured, write_jsonl, chatml):
    path = write_jsonl([chat("Hi", "Hello", "2+2?", "It is 4.")])
    # Each part is tokenised apart: the prompt, the replies, and what the template puts between them.
    needed = (
        count(chatml, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        + count(chatml, "Hello")
        + count(chatml, "<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
        + count(chatml, "It is 4.")
        + 1  # the token that ends the last reply
    )
    train, _ = load_prompts(make_structured(path, MULTITURN, sequence_len=needed), chatml)
    assert train[0]["ground_truth"] == "Hello"
    with pytest.raises(DataError, match="1 whose prompt and reference do not fit .* all turns of a conversation"):
        load_prompts(make_structured(path, MULTITURN, sequence_len=needed - 1), chatml)


def test_nothing_left_names_counts_and_way_out(make_structured, write_jsonl, chatml):
    path = write_jsonl([{"input": "a", "output": ""}])
    with pytest.raises(
        DataError, match=r"1 without a reference. No usable rows are left: .* sequence_len: 200 .*increase"
    ):
        load_prompts(make_structured(path), chatml)


def test_grpo_keeps_rows_without_a_reference(make_grpo, write_jsonl, chatml, own):
    path = write_jsonl([{"q": "2+2?", "answer": "4"}, {"q": "3+3?", "answer": "6"}])
    type = own('{"prompt": [{"role": "user", "content": example["q"]}]}', '{"remove_columns": ["q"]}')
    train, _ = load_prompts(make_grpo(path, type), chatml)
    assert train[:] == {
        "prompt": [[user("2+2?")], [user("3+3?")]],
        "ground_truth": [None, None],
        "answer": ["4", "6"],
    }


def test_grpo_counts_the_prompt_alone(make_grpo, write_jsonl, tokenizer, own, capsys):
    type = own('{"prompt": example["q"], "ground_truth": example["tests"]}')
    path = write_jsonl([{"q": "a b c", "tests": ["assert f()"] * 99}])
    length = len(tokenizer("a b c")["input_ids"])
    train, _ = load_prompts(make_grpo(path, type, sequence_len=length + 1), tokenizer)
    assert train[0]["ground_truth"] == ["assert f()"] * 99
    with pytest.raises(
        DataError, match="1 whose prompt leaves no room within sequence_len. .*provide rows with a prompt"
    ):
        load_prompts(make_grpo(path, type, sequence_len=length), tokenizer)


def test_template_arguments_count(make_structured, write_jsonl, chatml):
    chatml.chat_template = "{% if long %}{{ 'so ' * 300 }}{% endif %}" + chatml.chat_template
    path = write_jsonl([{"input": "a", "output": "b"}])
    assert len(load_prompts(make_structured(path), chatml)[0]) == 1
    with pytest.raises(DataError, match="1 whose prompt and reference do not fit"):
        load_prompts(make_structured(path, trl={"chat_template_kwargs": {"long": True}}), chatml)


@pytest.mark.parametrize("map_kwargs", ["{}", '{"remove_columns": ["q"]}', '{"remove_columns": "__all__"}'])
def test_own_transform_that_changes_its_row(make_grpo, write_jsonl, tokenizer, own, map_kwargs):
    type = own('example.update(prompt=example.pop("q"), answer=example["answer"] + 1) or example', map_kwargs)
    train, _ = load_prompts(make_grpo(write_jsonl([{"q": "2+2?", "answer": 4}]), type), tokenizer)
    assert (train[0]["prompt"], train[0]["answer"]) == ("2+2?", 5)


@pytest.mark.parametrize("processes", [1, 2])
def test_own_transform_of_texts_with_columns_for_rewards(make_structured, write_jsonl, tokenizer, own, processes):
    result = '{"prompt": example["q"], "ground_truth": "4", "n": len(example["q"]), "tests": [{"in": example["q"]}]}'
    config = make_structured(write_jsonl([{"q": "2+2?"}, {"q": "a"}]), own(result), dataset_num_proc=processes)
    train, _ = load_prompts(config, tokenizer)
    assert train[0] == {"prompt": "2+2?", "ground_truth": "4", "n": 4, "tests": [{"in": "2+2?"}]}
    assert train["n"][:] == [4, 1]


def test_own_batched_transform(make_structured, write_jsonl, tokenizer, own):
    result = '{"prompt": [q for q in example["q"] for _ in "ab"], "ground_truth": ["4"] * 2 * len(example["q"])}'
    type = own(result, '{"remove_columns": "__all__", "batched": True}')
    train, _ = load_prompts(make_structured(write_jsonl([{"q": "2+2?"}, {"q": "a"}]), type), tokenizer)
    assert train["prompt"][:] == ["2+2?", "2+2?", "a", "a"]


def test_columns_that_show_only_in_later_rows(make_structured, write_jsonl, chatml, monkeypatch):
    monkeypatch.setattr("ebft.data.prompts._BATCH", 2)
    rows = [chat("Hi", "Hello")] * 3
    rows += [{"messages": [user("Hi"), assistant("<think>a</think>b"), user("2+2?"), assistant("4")]}]
    path = write_jsonl(rows)
    train, _ = load_prompts(make_structured(path, "ebft_reasoning.transform_split_thinking"), chatml)
    assert train[3]["prompt"][1]["reasoning_content"] == "a" and train[0]["prompt"][0]["content"] == "Hi"


def test_columns_of_one_source_only(make_grpo, write_jsonl, tokenizer, own):
    paths = [write_jsonl([{"q": "a", "n": 1}], "a.jsonl"), write_jsonl([{"q": "b", "m": "x"}], "b.jsonl")]
    type = own('{"prompt": example["q"]}', '{"remove_columns": ["q"]}')
    config = make_grpo("unused", datasets=[{"path": str(path), "type": type} for path in paths])
    train, _ = load_prompts(config, tokenizer)
    assert train["n"][:] == [1, None] and train["m"][:] == [None, "x"]


def test_a_column_of_two_types(make_grpo, write_jsonl, tokenizer, own):
    paths = [write_jsonl([{"q": "a", "n": 1}], "a.jsonl"), write_jsonl([{"q": "b", "n": "one"}], "b.jsonl")]
    type = own('{"prompt": example["q"]}', '{"remove_columns": ["q"]}')
    config = make_grpo("unused", datasets=[{"path": str(path), "type": type} for path in paths])
    with pytest.raises(DataError, match="column 'n' contains values of different types .* or remove it"):
        load_prompts(config, tokenizer)


@pytest.mark.parametrize("name", ["completion", "completion_ids", "completions", "prompts", "trainer_state"])
def test_names_that_the_trainer_uses(make_grpo, write_jsonl, tokenizer, own, name):
    type = own('{"prompt": "a"}', "{}")
    with pytest.raises(DataError, match=f"row 0: {name}: reserved column name, .* add it to the .* remove_columns"):
        load_prompts(make_grpo(write_jsonl([{name: "x"}]), type), tokenizer)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ('{"prompt": 3, "ground_truth": "y"}', "row 0: prompt must contain a list of messages"),
        ('{"prompt": "x", "ground_truth": 3}', "row 0: ground_truth must be text, got int"),
        (
            '{"prompt": "x"}',
            "row 0: the field 'ground_truth' is missing; the transform returned prompt, but structured mode",
        ),
        ('{"ground_truth": "x"}', "row 0: the field 'prompt' is missing"),
        ('{"prompt": "x", "ground_truth": "y", "remaining_turns": "z"}', "row 0: remaining_turns must contain a list"),
        ('{"prompt": "x", "ground_truth": "y", "when": object()}', "row 0: column 'when' contains object, .* to text"),
        (
            '{"prompt": [{"role": "system", "content": "s"}, {"role": "tool", "content": {"text": "x"}}], '
            '"ground_truth": "y"}',
            "row 0: the contents of the messages in a row have different types .dict, str.. Use text for the content",
        ),
        ('{"prompt": [{"role": "user", "content": "x"}], "ground_truth": "y"}', "row 0: .* no chat template"),
        (
            '{"input_ids": [1, 2], "labels": [1, 2]}',
            "row 0: the transform returned input_ids and no prompt, but structured mode .* trains on rows of prompt "
            "and ground_truth. Use ebft_strided_structured.transform_prompts, ebft_opencode.transform, .* change the "
            "method",
        ),
    ],
)
def test_wrong_results_name_transform_row_and_field(make_structured, write_jsonl, tokenizer, own, result, message):
    path = write_jsonl([{"q": "a"}])
    with pytest.raises(DataError, match=message) as caught:
        load_prompts(make_structured(path, own(result)), tokenizer)
    assert str(caught.value).startswith(f"{path}, train: transform 'own_")


def test_text_and_messages_cannot_be_mixed(make_structured, write_jsonl, chatml, own):
    path = write_jsonl([{"input": "a", "output": "b"}])
    type = own('{"prompt": "x", "ground_truth": "y"}')
    entries = [{"path": str(path), "type": kind} for kind in (type, OPENCODE)]
    with pytest.raises(
        DataError, match="'own_.*' returns text, .*'ebft_opencode.transform' returns messages. Use text"
    ):
        load_prompts(make_structured(path, datasets=entries), chatml)


def test_held_out_chats_keep_their_turns_together(make_structured, write_jsonl, chatml):
    path = write_jsonl([chat(f"chat {i}", "a", "b", "c", "d", "e") for i in range(6)])
    config = make_structured(
        path, "ebft_chat_multiturn.transform_all_turns", val_set_size=2, shuffle_merged_datasets=True
    )
    train, evaluation = load_prompts(config, chatml)
    assert (len(train), len(evaluation)) == (12, 6)
    chats = lambda rows: {prompt[0]["content"] for prompt in rows["prompt"]}
    assert len(chats(train)) == 4 and len(chats(evaluation)) == 2 and not chats(train) & chats(evaluation)
    assert train.column_names == evaluation.column_names == ["prompt", "ground_truth"]


def test_shuffle_follows_the_seed(make_structured, write_jsonl, chatml):
    path = write_jsonl([{"input": str(number), "output": "x"} for number in range(20)])
    order = lambda **keys: load_prompts(make_structured(path, shuffle_merged_datasets=True, **keys), chatml)[0][:]
    assert order(seed=1) == order(seed=1) != order(seed=2)


def test_test_datasets_are_the_evaluation_rows(make_structured, write_jsonl, chatml):
    path = write_jsonl([{"input": "a", "output": "b"}] * 3)
    entry = {"path": str(path), "type": OPENCODE, "split": "train[:1]"}
    train, evaluation = load_prompts(make_structured(path, test_datasets=[entry]), chatml)
    assert (len(train), len(evaluation)) == (3, 1)


@pytest.mark.parametrize("name", ["transform", "transform_last_turn", "transform_all_turns"])
def test_turns_that_only_call_tools(make_structured, write_jsonl, chatml, name):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "weather"}]}
    talk = [user("Sun?"), call, {"role": "tool", "content": "yes"}, assistant("It is sunny.")]
    chatml.chat_template = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }}{% endfor %}"
    rows, _ = load_prompts(make_structured(write_jsonl([{"messages": talk}]), f"ebft_chat_multiturn.{name}"), chatml)
    assert rows["ground_truth"][:] == ["It is sunny."]
    assert [message["role"] for message in rows[0]["prompt"]] == ["user", "assistant", "tool"]


def test_turns_that_cannot_be_rolled_out_are_named_when_rows_are_read(make_grpo, write_jsonl, chatml, own):
    turns = [assistant("a"), assistant("b")]
    result = f'{{"prompt": [{user("x")}], "ground_truth": "y", "remaining_turns": {turns}}}'
    with pytest.raises(DataError, match="row 0: remaining_turns has two consecutive assistant turns"):
        load_prompts(make_grpo(write_jsonl([{"a": 1}]), own(result)), chatml)
