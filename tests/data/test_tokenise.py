"""Transforms of the user's own: how they are found and called, and what is said about wrong ones."""

import pytest

from ebft.errors import DataError
from tests.data.conftest import simple, tokenised


@pytest.fixture
def run_own(tokenizer, own):
    """`run_own(module, rows)`: what the transform of a module makes of rows."""
    two = {"a": "x"}, {"a": "y"}
    return lambda module, rows=two, **keys: tokenised(tokenizer, own(module), *rows, sequence_len=64, **keys)


def test_config_reads_as_attributes_and_as_a_mapping(run_own):
    body = """
    def transform(cfg, **kwargs):
        assert cfg.get("no_such_key") is None and "no_such_key" not in cfg
        length = cfg.sequence_len
        assert length == cfg["sequence_len"] == cfg.get("sequence_len")
        return lambda example, tokenizer=None: {"input_ids": [length], "labels": [length]}, {}
    """
    assert run_own(body)[0]["input_ids"] == [64]


@pytest.mark.parametrize(("fields", "expected"), [
    ('"input_ids": (ids := tokenizer(example["a"])["input_ids"]), "labels": ids', {"turn_spans": []}),
    ('"input_ids": [4, 5, 6], "labels": [-100, 5, 6]', {"prompt_length": 1}),
    ('"input_ids": [4, 5, 6], "labels": [4, -100, 6]', {"prompt_length": 0}),
    ('"input_ids": [4, 5, 6], "labels": [-100, -100, -100]', {"prompt_length": 0}),
    ('"input_ids": [4, 5, 6], "labels": [4, 5, 6], "turn_spans": [(0, 1), (2, 3)]',
     {"turn_spans": [[0, 1], [2, 3]]}),
    ('"input_ids": [1, 2, 0], "labels": [1, 2, -100], "attention_mask": [1, 1, 0]',  # padding is taken off
     {"input_ids": [1, 2], "labels": [1, 2]}),
])  # fmt: skip
def test_fields(run_own, fields, expected):
    assert run_own(simple(f"{{{fields}}}"))[0].items() >= expected.items()


def test_several_processes_give_the_same_rows(run_own, tokenizer):
    body = simple('{"input_ids": [ord(example["a"])], "labels": [1]}')
    rows = [{"a": chr(97 + number)} for number in range(6)]
    assert run_own(body, rows, dataset_num_proc=2)[:] == run_own(body, rows)[:]
    pairs = [{"instruction": "a", "output": "b"}] * 4
    assert tokenised(tokenizer, "alpaca", *pairs, dataset_num_proc=2)[:] == tokenised(tokenizer, "alpaca", *pairs)[:]


@pytest.mark.parametrize(("body", "message"), [
    (simple('{"input_ids": [1, 2], "labels": [1]}'), "labels has 1 entries, but input_ids has 2"),
    *((simple(f'{{"input_ids": {ids}, "labels": {labels}}}'), f"the row contains {wrong}, but the tokenizer's voc")
      for ids, labels, wrong in (("[-1]", "[1]", -1), ("[1.5]", "[1]", 1.5), ("[1]", "[10**6]", 10**6),
                                 ("[-100]", "[1]", -100))),
    (simple('{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [0, 1]}'), "must be ones followed by zeros"),
    *((simple(f'{{"input_ids": [1, 2], "labels": [1, 2], {field}}}'), "must be in order within 2 tokens")
      for field in ('"prompt_length": 3', '"turn_spans": [(0, 3)]', '"turn_spans": [(1, 2), (0, 1)]')),
    (simple('example["b"]'), r"row 0: KeyError: 'b' \(.*, line 4: .*\). The row has the columns a"),
])  # fmt: skip
def test_wrong_results_name_transform_row_and_field(run_own, body, message):
    with pytest.raises(DataError, match=message) as caught:
        run_own(body)
    assert str(caught.value).startswith("x, train: transform 'own_")
