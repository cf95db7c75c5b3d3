"""Ids of texts that continue others, with tokenizers that add a space to each text and others that do not."""

import pytest

from ebft.data.tokens import adds_space, ids_after, mask_after
from tests.data.space_tokenizers import SCHEMES, space_tokenizer
from tests.structured.conftest import make_chat_tokenizer

SPACE = pytest.mark.parametrize("scheme", SCHEMES)


def tokens(tokenizer, before, text):
    return tokenizer.convert_ids_to_tokens(ids_after(tokenizer, before, text))


@SPACE
def test_which_tokenizers_add_a_space(scheme, tokenizer):
    assert adds_space(space_tokenizer(scheme))
    assert not adds_space(space_tokenizer("never"))
    assert not adds_space(make_chat_tokenizer()) and not adds_space(tokenizer)


@SPACE
@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("b", " c", ["▁c"]),
        ("b", "c", ["c"]),
        ("b\n", "Hi c", ["Hi", "▁c"]),
        ("", "c b", ["c", "▁b"]),
        ("b ", "c", ["c"]),  # joined, the space and the word are one token
        ("H", "i", ["i"]),
        ("b", "", []),
    ],
)
def test_ids_without_an_added_space(scheme, before, text, expected):
    tokenizer = space_tokenizer(scheme)
    assert tokens(tokenizer, before, text) == expected
    assert tokenizer.convert_ids_to_tokens(tokenizer("c", add_special_tokens=False)["input_ids"]) == ["▁c"]


def test_other_tokenizers_are_not_changed(tokenizer):
    for before, text in (("a", "b c"), ("", " x"), ("def", "f(x)")):
        assert ids_after(tokenizer, before, text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@SPACE
def test_masks_fit_the_ids(scheme):
    tokenizer = space_tokenizer(scheme)
    assert tokens(tokenizer, "b", " c Hi b") == ["▁c", "▁Hi", "▁b"]
    assert mask_after(tokenizer, "b", " c Hi b", [(3, 5)]) == [False, True, False]
    assert mask_after(make_chat_tokenizer(), "b", "cd", [(1, 2)]) == [False, True]
