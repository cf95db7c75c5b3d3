"""The whole way from a `datasets:` section to prompts and references, and what is said about the rows left out."""

import pytest

from ebft.data.prompts import load_prompt_rows
from ebft.errors import DataError
from tests.data.conftest import assistant, simple, user

OPENCODE, MULTITURN = "ebft_opencode.transform", "ebft_chat_multiturn.transform"


@pytest.fixture
def load(make_config, write_jsonl, tokenizer):
    """`load(rows or config values, type, **keys)`: training and held-out rows of structured mode, in their order."""

    def run(rows, type=OPENCODE, tokenizer=tokenizer, **keys):
        path = write_jsonl(rows) if rows else "unused"
        defaults = {"ebft": {"mode": "structured"}, "shuffle_merged_datasets": False, "sequence_len": 200}
        return load_prompt_rows(make_config(path, type, **{**defaults, **keys}), tokenizer)[:2]

    return run


GRPO = {"rl": "grpo", "ebft": None}


def chat(*texts):
    return {"messages": [(assistant if index % 2 else user)(text) for index, text in enumerate(texts)]}


def test_rows_that_are_kept_and_dropped(load, chatml, capsys):
    rows = [("Add 1 2", "3"), (None, "3"), (" ", "3"), ("Add", None), ("Add", " \n"), ("Add", "<|end|>")]
    rows = [{"input": asked, "output": reply, "id": 1} for asked, reply in [*rows, ("Add", "x " * 200)]]
    train, evaluation = load(rows, tokenizer=chatml)
    assert evaluation is None and train[:] == {"prompt": [[user("Add 1 2")]], "ground_truth": ["3"]}
    said, counts = capsys.readouterr().err, "1 row; dropped 2 without a prompt, 3 without a reference, 1 whose prompt"
    assert f"datasets: 7 documents produced {counts} and reference do not fit within sequence_len (for ex" in said
    assert ", train, row 1)\n" in said
    with pytest.raises(DataError, match=r"2 without a prompt. No usable rows are left: correct the rows"):
        load(rows[1:3], tokenizer=chatml)


def test_remaining_turns_are_uniform(load, write_jsonl, chatml):
    talk = write_jsonl([chat("Hi", "Hello", "2+2?", "4"), chat("Hi", "Hello")], "talk.jsonl")
    pairs = write_jsonl([{"input": "a", "output": "b"}], "pairs.jsonl")
    datasets = [{"path": str(pairs), "type": OPENCODE}, {"path": str(talk), "type": MULTITURN}]
    train, _ = load(None, tokenizer=chatml, datasets=datasets)
    assert train["remaining_turns"][:] == [[], [user("2+2?"), assistant("4")], []]


def test_sequence_len_holds_the_whole_conversation(load, chatml):
    # Each part is tokenised apart: the prompt, the replies, and what the template puts between them.
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    parts = (start.format("Hi"), "Hello", "<|im_end|>\n" + start.format("2+2?"), "It is 4.")
    needed = 1 + sum(len(chatml(part, add_special_tokens=False)["input_ids"]) for part in parts)  # and its end
    talk = [chat("Hi", "Hello", "2+2?", "It is 4.")]
    assert load(talk, MULTITURN, chatml, sequence_len=needed)[0][0]["ground_truth"] == "Hello"
    with pytest.raises(DataError, match="1 whose prompt and reference do not fit within sequence_len"):
        load(talk, MULTITURN, chatml, sequence_len=needed - 1)
    long = {"chat_template_kwargs": {"long": True}}
    chatml.chat_template = "{% if long %}{{ 'so ' * 300 }}{% endif %}" + chatml.chat_template
    assert len(load(talk, MULTITURN, chatml)[0]) == 1
    with pytest.raises(DataError, match="1 whose prompt and reference do not fit"):
        load(talk, MULTITURN, chatml, trl=long)


def test_grpo_reads_the_prompt_alone(load, chatml, tokenizer, own):
    type = own(simple('{"prompt": [{"role": "user", "content": example["q"]}]}', '{"remove_columns": ["q"]}'))
    train, _ = load([{"q": "2+2?", "answer": "4"}, {"q": "3+3?", "answer": "6"}], type, chatml, **GRPO)
    prompts = [[user("2+2?")], [user("3+3?")]]
    assert train[:] == {"prompt": prompts, "ground_truth": [None, None], "answer": ["4", "6"]}
    rows = train.remove_columns("ground_truth").to_list()  # with chats as JSON text
    assert load(rows, "passthrough", chatml, **GRPO)[0][:] == train[:]  # every column
    refused = pytest.raises(DataError, load, [{"prompt": "a", "system": "b"}], "passthrough", **GRPO)
    assert "column 'system' has text" in str(refused.value)


def test_grpo_counts_the_prompt_alone(load, tokenizer, own):
    type, tests = own(simple('{"prompt": example["q"], "ground_truth": example["tests"]}')), ["assert f()"] * 99
    length = len(tokenizer("a b c")["input_ids"])
    rows = [{"q": "a b c", "tests": tests}]
    assert load(rows, type, **GRPO, sequence_len=length + 1)[0][0]["ground_truth"] == tests
    with pytest.raises(DataError, match="1 whose prompt leaves no room within sequence_len"):
        load(rows, type, **GRPO, sequence_len=length)


def test_own_transform_of_texts_with_columns_for_rewards(load, own):
    result = '{"prompt": example["q"], "ground_truth": "4", "n": len(example["q"]), "tests": [{"in": example["q"]}]}'
    train, _ = load([{"q": "2+2?"}, {"q": "a"}], own(simple(result)), dataset_num_proc=2)
    assert train[0] == {"prompt": "2+2?", "ground_truth": "4", "n": 4, "tests": [{"in": "2+2?"}]}
    assert train["n"][:] == [4, 1]


def test_columns_that_show_only_in_later_rows(load, chatml, monkeypatch):
    monkeypatch.setattr("ebft.data.prompts._BATCH", 2)
    rows = [chat("Hi", "Hello")] * 3 + [chat("Hi", "<think>a</think>b", "2+2?", "4")]
    train, _ = load(rows, "ebft_reasoning.transform_split_thinking", chatml)
    assert train[3]["prompt"][1]["reasoning_content"] == "a" and train[0]["prompt"][0]["content"] == "Hi"


XY = '"prompt": "x", "ground_truth": "y"'


@pytest.mark.parametrize(("result", "message"), [
    ('{"prompt": "x"}', "the field 'ground_truth' is missing; the transform returned prompt, but structured mode"),
    (f'{{{XY}, "completions": "x"}}', "completions: reserved column name, .* add it to the .* remove_columns"),
    ('{"prompt": [{"role": "user", "content": "x"}], "ground_truth": "y"}', ".* no chat template"),
])  # fmt: skip
def test_wrong_results_name_transform_row_and_field(load, own, chatml, tmp_path, result, message):
    with pytest.raises(DataError, match=f"row 0: {message}") as caught:
        load([{"q": "a"}], own(simple(result)))
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}, train: transform 'own_")


def test_text_and_messages_cannot_be_mixed(load, write_jsonl, chatml, own):
    path = write_jsonl([{"input": "a", "output": "b"}])
    entries = [{"path": str(path), "type": type} for type in (own(simple(f"{{{XY}}}")), OPENCODE)]
    with pytest.raises(DataError, match="column 'prompt' contains values of different types .list, str."):
        load(None, tokenizer=chatml, datasets=entries)


def test_held_out_chats_keep_their_turns_together(load, chatml):
    rows = [chat(f"chat {i}", "a", "b", "c", "d", "e") for i in range(6)]
    parts = load(rows, f"{MULTITURN}_all_turns", chatml, val_set_size=2, shuffle_merged_datasets=True)
    chats = [{prompt[0]["content"] for prompt in rows["prompt"]} for rows in parts]
    assert list(map(len, parts)) == [12, 6] and list(map(len, chats)) == [4, 2] and not chats[0] & chats[1]
    assert all(rows.column_names == ["prompt", "ground_truth"] for rows in parts)
