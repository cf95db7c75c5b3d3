"""The whole way from a `datasets:` section to rows, and the line that says what was dropped."""

import pytest

from ebft.data.load import load_datasets
from ebft.data.prompts import load_prompt_rows
from ebft.errors import DataError

TEXT = "import argparse\n\nparser = argparse.ArgumentParser(description='Process some integers.')\n"


def test_text_rows_are_windows_that_lose_no_text(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": TEXT * 6}])
    config = make_config(path, shuffle_merged_datasets=False)
    train, evaluation = load_datasets(config, tokenizer)
    assert evaluation is None
    assert train.column_names == ["input_ids", "labels", "prompt_length", "turn_spans"]
    whole = tokenizer(TEXT * 6)["input_ids"]
    joined = [token for row in train for token in row["input_ids"]]
    assert joined == whole[: len(joined)] and len(whole) - len(joined) < 16
    assert {len(row["input_ids"]) for row in train.select(range(len(train) - 1))} == {64}
    assert all(row["labels"] == row["input_ids"] and row["prompt_length"] == 0 for row in train)


def test_report_counts_what_was_dropped(make_config, write_jsonl, tokenizer, capsys):
    rows = [{"text": TEXT}, {"text": ""}, {"text": None}, {"text": "short"}, {"text": TEXT * 6}]
    load_datasets(make_config(write_jsonl(rows)), tokenizer)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("datasets: 5 documents produced ")
    assert "1 cut into windows of sequence_len" in line
    assert "2 without text" in line and "1 too short for one block" in line


def test_one_document_is_no_plural(make_config, write_jsonl, tokenizer, capsys):
    load_datasets(make_config(write_jsonl([{"text": TEXT}])), tokenizer)
    assert "datasets: 1 document produced 1 row" in capsys.readouterr().err


def test_chats_without_a_reply_are_told_from_empty_ones(make_config, write_jsonl, tokenizer, capsys):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    ask, reply = {"role": "user", "content": "Say hello."}, {"role": "assistant", "content": TEXT}
    rows = [{"messages": [ask, reply]}, {"messages": [ask]}, {"messages": None}]
    load_datasets(make_config(write_jsonl(rows), "ebft_strided_chat.transform"), tokenizer)
    line = capsys.readouterr().err
    tokenizer.chat_template = None
    assert "1 without text" in line and "1 without a reference" in line


def test_report_only_on_rank_zero(make_config, write_jsonl, tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    load_datasets(make_config(write_jsonl([{"text": TEXT}])), tokenizer)
    assert " produced " not in capsys.readouterr().err


def test_nothing_left_names_counts_and_way_out(make_config, write_jsonl, tokenizer):
    config = make_config(write_jsonl([{"text": "a"}, {"text": ""}]))
    with pytest.raises(
        DataError, match=r"1 without text, 1 too short.*Decrease the first three, increase sequence_len"
    ):
        load_datasets(config, tokenizer)


def test_prompt_rows_are_truncated_and_long_prompts_dropped(make_config, write_jsonl, tokenizer, capsys):
    rows = [{"input": "Say hello.", "output": TEXT * 4}, {"input": TEXT * 4, "output": "hello"}]
    config = make_config(write_jsonl(rows), "ebft_strided_structured.transform")
    train, _ = load_datasets(config, tokenizer)
    assert len(train) == 1 and len(train[0]["input_ids"]) == 64
    line = capsys.readouterr().err
    assert "1 truncated at sequence_len" in line
    assert "1 whose prompt leaves no room within sequence_len" in line


def test_several_sources_are_joined(make_config, write_jsonl, tokenizer):
    text = write_jsonl([{"text": TEXT}], "text.jsonl")
    pairs = write_jsonl([{"input": "Say hello.", "output": TEXT}], "pairs.jsonl")
    config = make_config(
        text,
        shuffle_merged_datasets=False,
        datasets=[
            {"path": str(text), "type": "ebft_pretrain.transform"},
            {"path": str(pairs), "type": "ebft_strided_structured.transform"},
        ],
    )
    train, _ = load_datasets(config, tokenizer)
    assert [row["prompt_length"] > 0 for row in train] == [False, True]


def test_shuffle_follows_the_seed(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": f"{number} {TEXT}"} for number in range(20)])
    order = lambda **keys: load_datasets(make_config(path, **keys), tokenizer)[0]["input_ids"][:]
    assert order(seed=1) == order(seed=1)
    assert order(seed=1) != order(seed=2)
    assert order(seed=1, data_seed=2) == order(seed=2)


@pytest.mark.parametrize(("size", "held"), [(0.25, 2), (0.02, 1), (3, 3)])
def test_val_set_holds_whole_documents_out(make_config, write_jsonl, tokenizer, size, held):
    path = write_jsonl([{"text": f"{chr(65 + number)}" * 3 + TEXT * 6} for number in range(8)])
    train, evaluation = load_datasets(make_config(path, val_set_size=size), tokenizer)
    per_document = (len(train) + len(evaluation)) / 8
    assert len(evaluation) == held * per_document


def test_what_is_held_out_does_not_depend_on_what_was_dropped(make_config, write_jsonl, tokenizer):
    """Short documents are dropped in strided mode alone; the others are held out, or not, in both methods alike."""
    rows = [{"text": f"{chr(65 + i)} " + TEXT * (6 if i % 3 else 1)} for i in range(20)]
    path = write_jsonl([{"text": row["text"] if i % 3 else row["text"][:9]} for i, row in enumerate(rows)])
    held = {}
    for name, keys in {"strided": {}, "plain": {"rl": None, "ebft": None}}.items():
        train, evaluation = load_datasets(make_config(path, val_set_size=8, **keys), tokenizer)
        starts = lambda rows: {tokenizer.decode(ids[:2]) for ids in rows["input_ids"]}
        held[name] = (starts(evaluation), starts(train))
    assert len(held["plain"][0] | held["plain"][1]) > len(held["strided"][0] | held["strided"][1])
    assert held["strided"][0] <= held["plain"][0] and held["strided"][1] <= held["plain"][1]


def test_val_set_needs_documents_on_both_sides(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": TEXT}])
    with pytest.raises(
        DataError, match="0.1 of 1 documents holds out 1, which leaves 0 usable documents for training and 1"
    ):
        load_datasets(make_config(path, val_set_size=0.1), tokenizer)


def test_test_datasets_are_the_evaluation_rows(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": TEXT}] * 3)
    entry = {"path": str(path), "type": "ebft_pretrain.transform", "split": "train[:1]"}
    train, evaluation = load_datasets(make_config(path, test_datasets=[entry]), tokenizer)
    assert (len(train), len(evaluation)) == (3, 1)


def test_plain_fine_tuning_keeps_short_rows(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": "hi"}])
    train, _ = load_datasets(make_config(path, "completion", rl=None, ebft=None), tokenizer)
    assert train[0]["input_ids"][-1] == tokenizer.eos_token_id


def test_a_long_row_stops_the_run_if_it_should(make_config, write_jsonl, tokenizer):
    first, second = write_jsonl([{"text": TEXT}], "a.jsonl"), write_jsonl([{"text": ""}, {"text": TEXT * 6}], "b.jsonl")
    entries = [{"path": str(path), "type": "completion"} for path in (first, second)]
    keys = {"rl": None, "ebft": None, "datasets": entries}
    config = make_config("unused", **keys, excess_length_strategy="raise")
    with pytest.raises(DataError, match=r"b.jsonl, train: row 1 exceeds sequence_len: 64 tokens \(excess_length"):
        load_datasets(config, tokenizer)
    assert len(load_datasets(make_config("unused", **keys, excess_length_strategy="drop"), tokenizer)[0]) == 1


@pytest.mark.parametrize(
    ("long", "others"), [(2, "64 tokens, and so does 1 other row \\("), (4, "64 tokens, and so do 3 other rows \\(")]
)
def test_the_error_for_a_long_row_counts_the_others(make_config, write_jsonl, tokenizer, long, others):
    path = write_jsonl([{"text": TEXT}, *[{"text": TEXT * 6}] * long])
    config = make_config(path, "completion", rl=None, ebft=None, excess_length_strategy="raise")
    with pytest.raises(DataError, match=f"rows.jsonl, train: row 1 exceeds sequence_len: {others}"):
        load_datasets(config, tokenizer)


def test_repeated_rows_are_dropped_before_any_are_held_out(make_config, write_jsonl, tokenizer, capsys):
    texts = [f"{TEXT} {number % 6}" for number in range(24)]
    first, second = (
        write_jsonl([{"text": text} for text in texts], "a.jsonl"),
        write_jsonl([{"text": texts[0]}], "b.jsonl"),
    )
    entries = [{"path": str(path), "type": "ebft_pretrain.transform"} for path in (first, second)]
    keys = {"datasets": entries, "val_set_size": 0.3, "dataset_exact_deduplication": True}
    train, evaluation = load_datasets(make_config("unused", **keys, seed=5), tokenizer)
    assert sorted(map(tuple, [*train["input_ids"], *evaluation["input_ids"]])) == sorted(
        {tuple(tokenizer(text)["input_ids"]) for text in texts}
    )
    assert "dropped 19 equal to an earlier row (for example" in capsys.readouterr().err


def test_rows_of_prompts_are_compared_by_all_that_they_contain(make_config, write_jsonl, tokenizer):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}, {"prompt": "a", "completion": "b"}]
    config = make_config(
        write_jsonl(rows),
        "ebft_strided_structured.transform_prompts",
        ebft={"mode": "structured"},
        dataset_exact_deduplication=True,
    )
    assert sorted(load_prompt_rows(config, tokenizer).train["ground_truth"]) == ["b", "c"]
