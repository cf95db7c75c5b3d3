"""Documents with the same text in other columns and formats."""

import json

import pytest

from ebft.tools.evaluation.notes import TextIndex, texts_of

TEXT = "A text of several words."


def same(one, other):
    return bool(TextIndex([texts_of(one)]).same_as(texts_of(other)))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"text": TEXT}, {"content": f" {TEXT}\n"}, True),
        ({"text": TEXT, "id": "a" * 99}, {"text": TEXT, "file": "/some/where/file.txt", "n": 3}, True),
        ({"prompt": "p", "completion": TEXT}, {"input": "p", "output": TEXT, "kind": "easy"}, True),
        ({"line": json.dumps({"question": "p", "answer": TEXT})}, {"prompt": "p", "completion": TEXT}, True),
        ({"prompt": TEXT, "completion": "yes"}, {"prompt": TEXT, "completion": "no"}, False),
        ({"text": "yes"}, {"prompt": TEXT, "completion": "yes"}, False),  # a short line of another text
        ({"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": None}, True),
        ({"input_ids": [1, 2]}, {"input_ids": [1, 3]}, False),
        ({"text": ""}, {"text": None}, False),
    ],
)
def test_rows_are_compared_by_their_texts(one, other, is_same):
    assert same(one, other) is is_same
    assert same(other, one) is is_same


def test_a_shared_system_prompt_does_not_make_documents_the_same():
    rows = [{"system": TEXT, "prompt": f"question {number}", "completion": "yes"} for number in range(50)]
    index = TextIndex([texts_of(row) for row in rows])
    assert list(index.same_as(texts_of({**rows[7], "id": "x"}))) == [7]
    assert not index.same_as(texts_of({"system": TEXT, "prompt": "another", "completion": "yes"}))
