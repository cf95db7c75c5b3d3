"""Where thinking blocks are, and the tokens of parts of a text, also with tokenizers that add a space to each text."""

import pytest

from ebft.data import messages, rendering
from ebft.data.tokens import TAGS, Tokens, adds_space, ids_after, mask_after, split_thinking, thinking_spans
from tests.data.space_tokenizers import SCHEMES, space_tokenizer


@pytest.mark.parametrize(("text", "blocks", "split"), [
    ("Just 4.", [], ("", "Just 4.")),
    ("<think>\n2+2\n</think>\n\n4", ["<think>\n2+2\n</think>\n\n"], ("2+2", "4")),
    ("\n<think>a</think>4", ["<think>a</think>"], ("a", "4")),
    ("2+2</think>\n4", ["2+2</think>\n"], ("2+2", "4")),  # the chat template opened it
    ("<think>never closed", [], ("", "<think>never closed")),
    ("a <think>b</think> c <think>d", ["<think>b</think> "], ("b", "a c <think>d")),
    ("<think>a</think>b<think>c</think> d", ["<think>a</think>", "<think>c</think> "], ("a\n\nc", "bd")),
    ("<think>a<reasoning>b</reasoning></think>c", ["<think>a<reasoning>b</reasoning></think>"], None),
    ("<think>a</think>  ", ["<think>a</think>  "], ("a", "")),
    *((f"{start}a{end} b", [f"{start}a{end} "], ("a", "b")) for start, end in TAGS),
    *((f"a{end} b", [f"a{end} "], ("a", "b")) for _, end in TAGS),
])  # fmt: skip
def test_blocks(text, blocks, split):
    assert [text[start:end] for start, end in thinking_spans(text)] == blocks
    assert split is None or split_thinking(text) == split


PARTS = """{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}
{%- elif part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% endif %}{% endfor %}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("reply", ["Four.", ""])
def test_thinking_that_the_template_reads_in_parts(chat_tokenizer, reply, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "chat_template", PARTS)
    parts = [{"type": "thinking", "thinking": "2+2"}, *([{"type": "text", "text": reply}] if reply else [])]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": parts}]
    render = rendering.ChatTemplate(chat_tokenizer)
    assert render(messages.as_texts(chat)) == chat_tokenizer.apply_chat_template(chat, tokenize=False)
    assert render([chat[0], {"role": "assistant", "content": reply, "reasoning": "2+2"}]).endswith(f"[/THINK]{reply}")


def test_tokens_of_a_block(tokenizer):
    text = "é <think>¿so?</think>\n\nFour 🙂."
    mask = Tokens(tokenizer, text).mask(thinking_spans(text))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    of = lambda is_on: tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on == is_on])
    thought, spoken = of(True), of(False)
    # The space before a tag may share its token.
    assert thought.strip() == "<think>¿so?</think>" and spoken.replace(" ", "") == "éFour🙂."
    assert not any(Tokens(tokenizer, text).mask([]))
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
    assert tokenizer("a  b", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (3, 3), (3, 4)]
    assert Tokens(tokenizer, "a  b").mask([(1, 3)]) == [False, True, False]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_and_masks_without_an_added_space(scheme):
    tokenizer = space_tokenizer(scheme)
    assert adds_space(tokenizer) and not adds_space(space_tokenizer("never"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("c", add_special_tokens=False)["input_ids"]) == ["▁c"]
    for before, text, expected in (
        ("b", " c", ["▁c"]), ("b", "c", ["c"]), ("b\n", "Hi c", ["Hi", "▁c"]), ("", "c b", ["c", "▁b"]),
        ("b ", "c", ["c"]),  # joined, the space and the word are one token
        ("H", "i", ["i"]), ("b", "", []), ("b", " c Hi b", ["▁c", "▁Hi", "▁b"]),
    ):  # fmt: skip
        assert tokenizer.convert_ids_to_tokens(ids_after(tokenizer, before, text)) == expected
    assert mask_after(tokenizer, "b", " c Hi b", [(3, 5)]) == [False, True, False]
