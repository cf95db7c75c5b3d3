"""Where thinking blocks are, by hand, and which tokens they take."""

import pytest

from ebft.data.tokens import TAGS, Tokens, join_thinking, split_thinking, thinking_spans
from ebft.errors import DataError


@pytest.mark.parametrize(
    ("text", "blocks", "split"),
    [
        ("Just 4.", [], ("", "Just 4.")),
        ("", [], ("", "")),
        ("<think>\n2+2\n</think>\n\n4", ["<think>\n2+2\n</think>\n\n"], ("2+2", "4")),
        ("\n<think>a</think>4", ["<think>a</think>"], ("a", "4")),
        ("<think>\n\n</think>\n\n4", ["<think>\n\n</think>\n\n"], ("", "4")),
        ("2+2</think>\n4", ["2+2</think>\n"], ("2+2", "4")),  # the chat template opened it
        ("<think>never closed", [], ("", "<think>never closed")),
        ("<think>a</thinking> b", [], ("", "<think>a</thinking> b")),
        ("a <think>b</think> c <think>d", ["<think>b</think> "], ("b", "a c <think>d")),
        ("<think>a</think>b<think>c</think> d", ["<think>a</think>", "<think>c</think> "], ("a\n\nc", "bd")),
        ("<think>a<reasoning>b</reasoning></think>c", ["<think>a<reasoning>b</reasoning></think>"], None),
        ("<think>a</think>b</think>c", ["<think>a</think>"], ("a", "b</think>c")),
        ("a</think>b <think>c</think>d", ["a</think>", "<think>c</think>"], ("a\n\nc", "b d")),
        ("<think>a</think>  ", ["<think>a</think>  "], ("a", "")),
    ],
)
def test_blocks(text, blocks, split):
    assert [text[start:end] for start, end in thinking_spans(text)] == blocks
    assert split is None or split_thinking(text) == split


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_every_spelling(opening, closing):
    assert split_thinking(f"{opening}a{closing} b") == ("a", "b")
    assert split_thinking(f"a{closing} b") == ("a", "b")


def test_joined_is_split_again():
    assert join_thinking("a", "b") == "<think>\na\n</think>\n\nb"
    assert split_thinking(join_thinking("a\n\nb", "c")) == ("a\n\nb", "c")


def test_tokens_of_a_block(tokenizer):
    text = "é <think>¿so?</think>\n\nFour 🙂."
    mask = Tokens(tokenizer, text).mask(thinking_spans(text))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(mask) == len(ids)
    thought = tokenizer.decode([token for token, masked in zip(ids, mask) if masked])
    spoken = tokenizer.decode([token for token, masked in zip(ids, mask) if not masked])
    # The space before a tag may share its token.
    assert thought.strip() == "<think>¿so?</think>" and spoken.replace(" ", "") == "éFour🙂."
    assert not any(Tokens(tokenizer, text).mask([]))


def test_a_token_that_only_touches_a_block_is_in_it(tokenizer):
    ids = tokenizer(" argparse", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert Tokens(tokenizer, " argparse").mask([(1, 2)]) == [start < 2 and end > 1 for start, end in ids]


def test_ranges_of_tokens(tokenizer):
    """Those of the mask of each range alone, without tokens of an earlier range."""
    text = "é print(1) <think>¿so?</think>\n\nFour 🙂.  argparse"
    cuts = [0, 2, 7, 9, 14, 20, 31, 33, 38, 40, len(text)]
    for spans in (list(zip(cuts, cuts[1:])), list(zip(cuts[::2], cuts[1::2])), [(1, 3), (len(text) - 2, len(text))]):
        taken, expected = 0, []
        for span in spans:
            on = [place for place, own in enumerate(Tokens(tokenizer, text).mask([span])) if own and place >= taken]
            expected += [[on[0], on[-1] + 1]] if on else []
            taken = max([taken, *(place + 1 for place in on)])
        assert Tokens(tokenizer, text).ranges_of(spans) == expected and len(expected) > 1
    assert Tokens(tokenizer, "").ranges_of([(0, 1)]) == []


def test_tokens_of_spaces_alone_without_offsets():
    """Byte-level tokenizers that trim offsets leave a token of spaces with none of its characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["Ġ", "ĠĠ", "a", "b"])}
    trimming = Tokenizer(models.BPE(vocabulary, [("Ġ", "Ġ")]))
    trimming.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trimming)
    encoded = tokenizer("a  b", return_offsets_mapping=True)
    assert encoded["offset_mapping"] == [(0, 1), (3, 3), (3, 4)]
    assert Tokens(tokenizer, "a  b").mask([(1, 3)]) == [False, True, False]


def test_a_tokenizer_without_offsets():
    class SlowTokenizer:
        is_fast = False

        def __call__(self, text, **kwargs):
            return {"input_ids": [1]}

    with pytest.raises(DataError, match="SlowTokenizer does not support offset mapping, .* Use a fast tokenizer"):
        Tokens(SlowTokenizer(), "a").mask([])
