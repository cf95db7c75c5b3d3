"""The whole way from a `datasets:` section to rows, and the line that says what was dropped."""

import re

import pytest

from ebft.data.load import load_token_rows
from ebft.errors import DataError

TEXT = "import argparse\n\nparser = argparse.ArgumentParser(description='Process some integers.')\n"
PLAIN = {"rl": None, "ebft": None}


@pytest.fixture
def load(make_config, write_jsonl, tokenizer):
    """`load(texts or rows, type, **keys)`: training and held-out rows of strided mode."""

    def run(rows, type="ebft_pretrain.transform", **keys):
        rows = [{"text": row} if not isinstance(row, dict) else row for row in rows]
        return load_token_rows(make_config(write_jsonl(rows), type, **keys), tokenizer)[:2]

    return run


def test_text_rows_are_windows_that_lose_no_text(load, tokenizer):
    train, evaluation = load([TEXT * 6], shuffle_merged_datasets=False)
    assert evaluation is None
    assert train.column_names == ["input_ids", "labels", "prompt_length", "turn_spans"]
    whole = tokenizer(TEXT * 6)["input_ids"]
    joined = [token for row in train for token in row["input_ids"]]
    assert joined == whole[: len(joined)] and len(whole) - len(joined) < 16
    assert {len(row["input_ids"]) for row in train.select(range(len(train) - 1))} == {64}
    assert all(row["labels"] == row["input_ids"] and row["prompt_length"] == 0 for row in train)


def test_the_first_process_alone_says_what_was_dropped(load, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    load([TEXT])
    assert " produced " not in capsys.readouterr().err


def test_a_warning_if_most_rows_are_too_short(load):
    with pytest.warns(UserWarning, match=r"2 of 3 documents are dropped \(too short for one block\): a block"):
        load([TEXT, "short", "short too"])


def test_shuffle_follows_the_seed(load):
    order = lambda **keys: load([f"{number} {TEXT}" for number in range(20)], **keys)[0]["input_ids"][:]
    assert order(seed=1) == order(seed=1) != order(seed=2) == order(seed=1, data_seed=2)


@pytest.mark.parametrize(("size", "held"), [(0.25, 2), (0.02, 1), (3, 3)])
def test_val_set_holds_whole_documents_out(load, size, held):
    train, evaluation = load([f"{chr(65 + number)}" * 3 + TEXT * 6 for number in range(8)], val_set_size=size)
    assert len(evaluation) == held * (len(train) + len(evaluation)) / 8


def test_what_is_held_out_does_not_depend_on_what_was_dropped(load, tokenizer):
    """Short documents are dropped in strided mode alone; the others are held out, or not, in both methods alike."""
    texts = [f"{chr(65 + i)} " + (TEXT * 6 if i % 3 else TEXT[:7]) for i in range(20)]
    starts = lambda rows: {tokenizer.decode(ids[:2]) for ids in rows["input_ids"]}
    strided, plain = ([starts(rows) for rows in load(texts, val_set_size=8, **keys)] for keys in ({}, PLAIN))
    assert len(plain[0] | plain[1]) > len(strided[0] | strided[1])
    assert strided[0] <= plain[0] and strided[1] <= plain[1]


def test_batched_transforms_that_change_the_number_of_rows_keep_documents_apart(load, tokenizer, own):
    type = own("""
def transform(cfg, **kwargs):
    def split(batch, tokenizer=None):
        ids = [tokenizer(part)["input_ids"] for text in batch["text"] if text for part in text.split("|")]
        return {"input_ids": ids, "labels": ids}
    return split, {"batched": True, "remove_columns": "__all__"}
""")
    texts = [text for number in range(20) for text in ("", f"{number}|{number}")]  # as many rows as documents
    parts = load(texts, type, val_set_size=0.25, **PLAIN)
    trained, held = ({tokenizer.decode(ids) for ids in rows["input_ids"]} for rows in parts)
    assert len(trained) == 15 and len(held) == 5 and not trained & held and list(map(len, parts)) == [30, 10]


def test_documents_without_text_are_not_held_out(load):
    texts = [TEXT, *[" \n"] * 6, TEXT, TEXT, TEXT]
    for seed in range(4):
        assert [len(load(texts, val_set_size=size, seed=seed)[1]) for size in (0.5, 1)] == [2, 1]
    with pytest.raises(DataError, match="val_set_size: 4 of 4 documents with text holds out 4"):
        load(texts, val_set_size=4)


def test_messages_name_the_files_of_a_folder(tmp_path, make_config, tokenizer, capsys):
    for number, text in enumerate([TEXT, "", TEXT * 60]):
        (tmp_path / f"{number:02}.txt").write_text(text)
    load_token_rows(make_config(tmp_path), tokenizer)
    printed = " ".join(capsys.readouterr().err.split())
    assert "3 documents produced " in printed and f"(for example {tmp_path / '01.txt'})" in printed
    assert re.search(rf"; (\d+) of the rows are of {tmp_path / '02.txt'}; dropped 1 without text", printed)
    with pytest.raises(DataError, match=f"{tmp_path / '02.txt'} exceeds sequence_len: 64 tokens"):
        load_token_rows(make_config(tmp_path, **PLAIN, excess_length_strategy="raise"), tokenizer)


def test_repeated_rows_are_dropped_before_any_are_held_out(load, write_jsonl, tokenizer, capsys):
    texts = [f"{TEXT} {number % 6}" for number in range(24)]
    paths = [write_jsonl([{"text": text} for text in part], f"{len(part)}.jsonl") for part in (texts, texts[:1])]
    entries = [{"path": str(path), "type": "ebft_pretrain.transform"} for path in paths]
    parts = load([], datasets=entries, val_set_size=0.3, dataset_exact_deduplication=True, seed=5)
    found = sorted(tuple(ids) for rows in parts for ids in rows["input_ids"])
    assert found == sorted({tuple(tokenizer(text)["input_ids"]) for text in texts})
    assert "dropped 19 equal to an earlier row (for example" in capsys.readouterr().err
