"""Rows written out by hand: which tokens have labels, where the anchors are, what the references are."""

import pytest

from ebft.anchors import BlockOptions
from ebft.config.options import EBFTSection
from ebft.data.documents import pack_rows
from ebft.methods import views
from tests.structured.conftest import make_chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte."""
    return make_chat_tokenizer()


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def row(tokenizer, prompt, completion, masked=()):
    prompt, completion = ids(tokenizer, prompt), ids(tokenizer, completion)
    labels = [-100] * len(prompt) + completion
    labels = [-100 if index in masked else label for index, label in enumerate(labels)]
    return {"input_ids": prompt + completion, "labels": labels, "prompt_length": len(prompt)}


def learned(part):
    return "".join(token.text if token.label == token.id else "_" for token in part.tokens)


def options(**given):
    blocks = {"context_length": 2, "min_completion_prefix": 1, "stride": 2, "generate_max_len": 2}
    return EBFTSection(mode="strided", n_samples_per_prompt=3, **{**blocks, **given})


def strided_view(tokenizer, **given):
    chosen = options(**given)
    return views.StridedView(chosen, BlockOptions.of(chosen, [tokenizer.eos_token_id], None), tokenizer)


def test_a_document_with_a_prompt(tokenizer):
    """a_0 = max(3 + 1, 2) = 4; 9 tokens have room for anchors 4 and 6."""
    [part] = strided_view(tokenizer, ce_coef=0.1)(row(tokenizer, "abc", "defghi", masked=[5])).parts
    assert part.title == "document" and learned(part) == "___de_ghi"
    assert [token.anchor for token in part.tokens] == [None, None, None, None, 4, None, 6, None, None]
    blocks = [(block.anchor, block.context, block.reference) for block in part.blocks]
    assert blocks == [(4, "abcd", "ef"), (6, "abcdef", "gh")]
    facts = dict(part.facts)
    assert facts["prompt"] == "3 tokens" and facts["first anchor"] == "4"
    assert facts["blocks"] == "2, stride 2, up to 2 tokens each" and facts["sampled"].startswith("up to 12 tokens")
    assert facts["in the cross-entropy"] == "5 of 9 tokens" and "ebft.ce_coef" not in facts


def test_a_document_with_turns(tokenizer):
    """Anchors at 1 + 1 -> 2 and 5 + 1; the turn 9-10 is too short."""
    given = {**row(tokenizer, "abcdefghijkl", ""), "labels": ids(tokenizer, "abcdefghijkl"), "prompt_length": 9}
    view = strided_view(tokenizer)
    [part] = view({**given, "turn_spans": [[1, 5], [5, 8], [9, 11]]}).parts
    assert learned(part) == "_bcdefgh_jk_" and [block.anchor for block in part.blocks] == [2, 6]
    facts = dict(part.facts)
    assert facts["turns"] == "1-4 (1 block), 5-7 (1 block), 9-10 (0 blocks)"
    assert facts["prompt"] == "1 tokens" and facts["in the cross-entropy"] == "9 of 12 tokens"
    [part] = view({**given, "turn_spans": [[9, 12]]}).parts
    assert "turns" not in dict(part.facts) and dict(part.facts)["prompt"] == "9 tokens"


def test_a_packed_row_has_its_documents(tokenizer):
    packed = pack_rows([row(tokenizer, "", "abcdef"), row(tokenizer, "x", "yzuvw")], 16)
    first, second = strided_view(tokenizer)(packed[0]).parts
    assert [first.title, second.title] == ["document 1 of 2", "document 2 of 2"]
    assert learned(first) == "_bcdef" and learned(second) == "_yzuvw"
    assert [[block.anchor for block in part.blocks] for part in (first, second)] == [[2, 4], [2, 4]]
    assert [block.reference for block in second.blocks] == ["zu", "vw"]


def roles(part):
    """The runs of a part as (role, text), which cover all of its tokens."""
    assert [place for run in part.roles for place in range(run.start, run.stop)] == list(range(len(part.tokens)))
    return [(run.role, part.text(run)) for run in part.roles]


ASKED, SAID = r"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
GAP = r"\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def trained_row(tokenizer, *pieces):
    """A row of texts with (text, is trained on); the last one that is trained on is the last turn."""
    segments = [(ids(tokenizer, text.replace(r"\n", "\n")), trained) for text, trained in pieces]
    labels = [token if trained else -100 for tokens, trained in segments for token in tokens]
    before = max(index for index, (_, trained) in enumerate(segments) if trained)
    given = {"input_ids": [token for tokens, _ in segments for token in tokens], "labels": labels}
    return given | {"prompt_length": sum(len(tokens) for tokens, _ in segments[:before])}


SECOND = [("prompt", ASKED), ("reference", "ab"), ("end of turn", SAID), ("between turns", GAP), ("reference", "de"),
          ("end of turn", SAID)]  # fmt: skip


@pytest.mark.parametrize(("pieces", "expected"), [
    ([(ASKED, False), ("ab" + SAID, True), (GAP, False), ("de" + SAID, True)], SECOND),
    # the end of a turn has no label
    ([(ASKED, False), ("ab", True), (SAID + GAP, False), ("de", True), (SAID, False)], SECOND),
    ([("abc<|endoftext|>", True)], [("text", "abc<|endoftext|>")]),
])  # fmt: skip
def test_the_roles_of_tokens(tokenizer, pieces, expected):
    row = trained_row(tokenizer, *pieces)
    for view in (views.SFTView(tokenizer), strided_view(tokenizer)):
        assert roles(view(row).parts[0]) == expected


SIDES = (("chosen", "xa"), ("rejected", "xb"))


def test_the_roles_of_reward_rows(tokenizer):
    start = ASKED.replace(r"\n", "\n")
    row = {f"{side}_ids": ids(tokenizer, f"{start}{text}<|im_end|>\n") for side, text in SIDES}
    chosen, rejected = views.ComparisonView(tokenizer)(row).parts
    end = ("end of turn", r"<|im_end|>\n")
    assert roles(chosen) == [("in both texts", ASKED + "x"), ("chosen reply", "a"), end]
    assert roles(rejected) == [("in both texts", ASKED + "x"), ("rejected reply", "b"), end]
    labels = [-100, -100, -100, 1, -100, 0, -100]
    [part] = views.StepView(tokenizer)({"input_ids": ids(tokenizer, "abc|d|e"), "labels": labels}).parts
    assert roles(part) == [("prompt and step 1", "abc|"), ("step 2", "d|"), ("after the last label", "e")]


TALK = {
    "prompt": [{"role": "user", "content": "hi"}], "ground_truth": "<think>q</think>ab",
    "remaining_turns": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "level": 3,
}  # fmt: skip


def test_a_conversation_in_structured_mode(tokenizer):
    view = views.PromptView(tokenizer, None, True, ce_coef=0.5, mask_thinking=True)(TALK)
    texts = ["".join(token.text for token in part.tokens) for part in view.parts]
    titles = ["prompt", "reference of turn 1", "before turn 2", "reference of turn 2"]
    assert [part.title for part in view.parts] == titles
    assert texts == [ASKED, "<think>q</think>ab", SAID + GAP, "d<|im_end|>"]
    assert set(learned(view.parts[0])) == {"_"}
    assert learned(view.parts[1]) == "_" * 16 + "ab"
    assert learned(view.parts[2]).strip("_") == "<|im_end|>"  # of the first reply
    assert learned(view.parts[3]) == "d<|im_end|>"
    assert [token.special for token in view.parts[3].tokens] == [False, True]
    assert view.columns == [("level", "3")]
    assert [roles(part) for part in view.parts] == [
        [("prompt", texts[0])],
        [("reference", texts[1])],
        [("end of turn", "<|im_end|>"), ("between turns", texts[2].removeprefix("<|im_end|>"))],
        [("reference", "d"), ("end of turn", "<|im_end|>")],
    ]


def test_texts_are_printable_and_keep_spaces(tokenizer):
    texts = views.TokenTexts(tokenizer)
    assert texts.texts(ids(tokenizer, "a b\n")) == ["a", " ", "b", "\\n"]
    assert texts.texts(ids(tokenizer, "é")) == ["Ã", "©"]  # as the tokenizer spells bytes
    assert views.one_line("\x1b[31m") == "\\x1b[31m" and views.one_line({"a": "\n"}) == "{'a': '\\n'}"


def scored(part):
    """The text of a part, with the scored tokens in brackets."""
    return "".join(f"[{token.text}]" if token.label != -100 else token.text for token in part.tokens)


def test_chosen_and_rejected_and_a_completion_with_its_label(tokenizer):
    ids = {f"{name}_ids": tokenizer(text)["input_ids"] for name, text in (("prompt", "Hi"), ("chosen", "yo"))}
    view = views.PreferenceView(tokenizer)({**ids, "rejected_ids": tokenizer("no<|im_end|>")["input_ids"]})
    assert [part.title for part in view.parts] == ["chosen", "rejected"] and view.columns == []
    assert [scored(part) for part in view.parts] == ["Hi[y][o]", "Hi[n][o][<|im_end|>]"]
    chosen, rejected = map(roles, view.parts)
    assert chosen == [("prompt", "Hi"), ("completion", "yo")]
    assert rejected == [("prompt", "Hi"), ("completion", "no"), ("end of turn", "<|im_end|>")]
    assert view.parts[1].facts == [("prompt", "2 tokens"), ("scored", "3 of 5 tokens")]
    labelled = {"prompt_ids": ids["prompt_ids"], "completion_ids": ids["chosen_ids"], "label": False}
    view = views.PreferenceView(tokenizer)(labelled)
    assert [scored(part) for part in view.parts] == ["Hi[y][o]"] and view.columns == [("label", "false")]
