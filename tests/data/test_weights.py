"""Datasets with weights: how often each document is trained on, with held-out data, windows and every kind of rows."""

from collections import Counter

import pytest

from ebft.data.load import load_datasets
from ebft.data.preferences import load_preference_rows
from ebft.data.prompts import load_prompt_rows
from ebft.errors import ConfigError, DataError


def words(name, number):
    return " ".join(f"{name}{number}" for _ in range(12))


@pytest.fixture
def two(make_config, write_jsonl):
    """`two(first, second, **keys)`: a config of 10 documents a0 to a9 and 10 documents b0 to b9, with these weights."""

    def make(first, second, **keys):
        entries = []
        for name, weight in (("a", first), ("b", second)):
            path = write_jsonl([{"text": words(name, n)} for n in range(10)], f"{name}.jsonl")
            entry = {"path": str(path), "type": "ebft_pretrain.transform"}
            entries.append(entry if weight is None else {**entry, "weight": weight})
        return make_config("unused", **{"sequence_len": 256, "datasets": entries, **keys})

    return make


def names(rows, tokenizer):
    return [tokenizer.decode(ids, skip_special_tokens=True).split()[0] for ids in rows["input_ids"]]


def counts(rows, tokenizer):
    return Counter(names(rows, tokenizer))


def test_each_row_appears_as_often_as_the_weight_of_its_dataset(two, tokenizer, capsys):
    train, _ = load_datasets(two(2, 0.5), tokenizer)
    found = counts(train, tokenizer)
    assert {found[f"a{n}"] for n in range(10)} == {2}
    assert sorted(found[f"b{n}"] for n in range(10)) == [0] * 5 + [1] * 5
    printed = capsys.readouterr().err
    assert "datasets.0.weight: 2.0: 10 -> 20 rows" in printed and "datasets.1.weight: 0.5: 10 -> 5 rows" in printed


def test_the_fraction_of_a_weight_is_a_random_part_that_the_seed_determines(two, tokenizer):
    chosen = []
    for seed in (1, 1, 2, 3):
        found = counts(load_datasets(two(None, 2.3, seed=seed), tokenizer)[0], tokenizer)
        assert {found[f"a{n}"] for n in range(10)} == {1}
        assert sorted(found[f"b{n}"] for n in range(10)) == [2] * 7 + [3] * 3
        chosen.append(frozenset(name for name, times in found.items() if times == 3))
    assert chosen[0] == chosen[1] and len(set(chosen)) == 3


def test_rows_of_equal_weights_are_the_rows_without_weights(two, tokenizer):
    plain = load_datasets(two(None, None), tokenizer)[0]
    assert load_datasets(two(1, 1.0), tokenizer)[0]["input_ids"][:] == plain["input_ids"][:]


def test_without_shuffling_a_dataset_is_repeated_as_a_whole(two, tokenizer):
    train, _ = load_datasets(two(2, None, shuffle_merged_datasets=False), tokenizer)
    once = [f"a{n}" for n in range(10)]
    assert names(train, tokenizer) == once + once + [f"b{n}" for n in range(10)]


def test_held_out_documents_are_neither_repeated_nor_trained_on(two, tokenizer):
    train, evaluation = load_datasets(two(3, 0.5, val_set_size=6), tokenizer)
    held, learned = counts(evaluation, tokenizer), counts(train, tokenizer)
    assert set(held.values()) == {1} and len(held) == 6
    assert not held.keys() & learned.keys()
    without = load_datasets(two(None, None, val_set_size=6), tokenizer)[1]
    assert counts(without, tokenizer) == held


def test_windows_of_a_document_stay_together(make_config, write_jsonl, tokenizer):
    path = write_jsonl([{"text": " ".join(f"{name}{n}" for n in range(80))} for name in "abcdefgh"])
    config = make_config(path, entry={"weight": 0.5}, shuffle_merged_datasets=False)
    rows = load_datasets(config, tokenizer)[0]["input_ids"]
    whole = load_datasets(make_config(path, shuffle_merged_datasets=False), tokenizer)[0]["input_ids"]
    first = [place for place, ids in enumerate(whole) if ids[0] == tokenizer.bos_token_id]
    documents = [whole[a:b] for a, b in zip(first, [*first[1:], len(whole)])]
    taken = [document for document in documents if document[0] in rows[:]]
    assert len(first) == 8 and len(taken) == 4 and rows[:] == [ids for document in taken for ids in document]


def test_prompts_and_preferences_have_weights(make_config, write_jsonl, tokenizer):
    prompts = write_jsonl([{"prompt": f"say {n}", "completion": f"{n}"} for n in range(4)], "p.jsonl")
    config = make_config(
        prompts, "ebft_strided_structured.transform_prompts", {"weight": 1.5}, ebft={"mode": "structured"}
    )
    train = load_prompt_rows(config, tokenizer).train
    assert sorted(Counter(train["ground_truth"]).values()) == [1, 1, 2, 2]
    pairs = write_jsonl([{"prompt": f"p{n}", "chosen": "yes", "rejected": "no"} for n in range(4)], "d.jsonl")
    config = make_config(pairs, {"field_prompt": "prompt"}, {"weight": 2}, rl="dpo", ebft=None)
    train = load_preference_rows(config, tokenizer).train
    assert len(train) == 8


def test_a_weight_that_leaves_nothing_is_an_error(two, tokenizer):
    with pytest.raises(DataError, match=r"datasets.1.weight: 0.01 of 10 documents of .*b.jsonl rounds to none. Raise"):
        load_datasets(two(None, 0.01), tokenizer)


@pytest.mark.parametrize("weight", [0, -1, "many", float("nan"), float("inf"), 1e9])
def test_weights_are_positive_numbers(make_config, weight):
    with pytest.raises(ConfigError, match="datasets.0.weight"):
        make_config("rows.jsonl", entry={"weight": weight})


def test_held_out_datasets_have_no_weight(make_config):
    entry = {"path": "rows.jsonl", "type": "ebft_pretrain.transform", "weight": 2}
    with pytest.raises(ConfigError, match="test_datasets.0.weight has no effect"):
        make_config("rows.jsonl", test_datasets=[entry])
