"""Datasets with weights: how often each document is trained on, with held-out data, windows and every kind of rows."""

from collections import Counter

import pytest

from ebft.data.load import load_token_rows
from ebft.errors import DataError


@pytest.fixture
def names(make_config, write_jsonl, tokenizer):
    """`names(first, second, **keys)`: training and held-out rows of a0 to a9 and b0 to b9 with these weights."""

    def make(first, second, **keys):
        entries = []
        for name, weight in (("a", first), ("b", second)):
            path = write_jsonl([{"text": " ".join([f"{name}{n}"] * 12)} for n in range(10)], f"{name}.jsonl")
            entry = {"path": str(path), "type": "ebft_pretrain.transform"}
            entries.append(entry if weight is None else {**entry, "weight": weight})
        parts = load_token_rows(make_config("x", **{"sequence_len": 256, "datasets": entries, **keys}), tokenizer)[:2]
        words = lambda ids: tokenizer.decode(ids, skip_special_tokens=True).split()[0]
        return [[words(ids) for ids in rows["input_ids"]] for rows in parts if rows is not None]

    return make


def times(found, name):
    return sorted(Counter(found)[f"{name}{n}"] for n in range(10))


def test_each_row_appears_as_often_as_the_weight_of_its_dataset(names, capsys):
    (found,) = names(2, 0.5)
    assert times(found, "a") == [2] * 10 and times(found, "b") == [0] * 5 + [1] * 5
    printed = capsys.readouterr().err
    assert "datasets.0.weight: 2.0: 10 -> 20 rows" in printed and "datasets.1.weight: 0.5: 10 -> 5 rows" in printed
    assert names(1, 1.0) == names(None, None)
    once = [f"a{n}" for n in range(10)]  # without shuffling, a dataset is repeated as a whole
    assert names(2, None, shuffle_merged_datasets=False) == [once + once + [f"b{n}" for n in range(10)]]


def test_the_fraction_of_a_weight_is_a_random_part_that_the_seed_determines(names):
    chosen = []
    for seed in (1, 1, 2, 3):
        (found,) = names(None, 2.3, seed=seed)
        assert times(found, "a") == [1] * 10 and times(found, "b") == [2] * 7 + [3] * 3
        chosen.append(frozenset(name for name, count in Counter(found).items() if count == 3))
    assert chosen[0] == chosen[1] and len(set(chosen)) == 3


def test_held_out_documents_are_neither_repeated_nor_trained_on(names):
    train, evaluation = names(3, 0.5, val_set_size=6)
    assert len(evaluation) == len(set(evaluation)) == 6 and not set(evaluation) & set(train)
    assert sorted(names(None, None, val_set_size=6)[1]) == sorted(evaluation)


def test_windows_of_a_document_stay_together(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": " ".join(f"{name}{n}" for n in range(80))} for name in "abcdefgh"])
    load = lambda entry: load_token_rows(make_config(path, entry=entry, shuffle_merged_datasets=False), tokenizer)[0]
    rows, whole = (load(entry)["input_ids"][:] for entry in ({"weight": 0.5}, {}))
    first = [place for place, ids in enumerate(whole) if ids[0] == tokenizer.bos_token_id]
    documents = [whole[a:b] for a, b in zip(first, [*first[1:], len(whole)])]
    taken = [document for document in documents if document[0] in rows]
    assert len(first) == 8 and len(taken) == 4 and rows == [ids for document in taken for ids in document]


def test_a_weight_that_leaves_no_row(names):
    with pytest.raises(DataError, match=r"datasets.1.weight: 0.01 of 10 documents of .*b.jsonl rounds to none. Raise"):
        names(None, 0.01)
