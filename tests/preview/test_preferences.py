"""Rows of preference methods in the preview: each completion after its prompt, with what is scored."""

from ebft.methods.views import PreferenceView
from tests.structured.conftest import make_chat_tokenizer


def shown(part):
    """The text of a part, with the scored tokens in brackets."""
    return "".join(f"[{token.text}]" if token.label != -100 else token.text for token in part.tokens)


def test_chosen_and_rejected_and_a_completion_with_its_label():
    tokenizer = make_chat_tokenizer()
    ids = {f"{name}_ids": tokenizer(text)["input_ids"] for name, text in (("prompt", "Hi"), ("chosen", "yo"))}
    view = PreferenceView(tokenizer)({**ids, "rejected_ids": tokenizer("no<|im_end|>")["input_ids"]})
    assert [part.title for part in view.parts] == ["chosen", "rejected"] and view.columns == []
    assert [shown(part) for part in view.parts] == ["Hi[y][o]", "Hi[n][o][<|im_end|>]"]
    chosen, rejected = [[(run.role, part.text(run)) for run in part.roles] for part in view.parts]
    assert chosen == [("prompt", "Hi"), ("completion", "yo")]
    assert rejected == [("prompt", "Hi"), ("completion", "no"), ("end of turn", "<|im_end|>")]
    assert view.parts[1].facts == [("prompt", "2 tokens"), ("scored", "3 of 5 tokens")]
    labelled = {"prompt_ids": ids["prompt_ids"], "completion_ids": ids["chosen_ids"], "label": False}
    view = PreferenceView(tokenizer)(labelled)
    assert [shown(part) for part in view.parts] == ["Hi[y][o]"] and view.columns == [("label", "false")]
