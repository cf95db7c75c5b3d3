"""Rows of token ids: which tokens are the prompt and which are scored, what is dropped, and what is an error."""

import pytest

from ebft.data.preferences import load_preference_rows
from ebft.data.row_counts import EQUAL
from ebft.errors import DataError
from tests.config.conftest import warned
from tests.data.conftest import assistant, user
from tests.data.space_tokenizers import space_tokenizer
from tests.preferences.runs import config_of
from tests.structured.conftest import make_chat_tokenizer

PAIR = {"prompt": "Hi", "chosen": "Yes", "rejected": "No!"}
CHAT = {"prompt": [user("Hi")], "chosen": [assistant("Yes")], "rejected": [assistant("No!")]}
QUESTION = {"question": "Hi", "chosen": "Yes", "rejected": "No!"}


@pytest.fixture
def load(tmp_path, write_jsonl):
    """`load(rows, method, **changes)`: the rows that are loaded; `type` can be several, each of a dataset."""

    def run(rows, method="dpo", type="passthrough", tokenizer=None, **changes):
        path, types = str(write_jsonl(rows)), [type] if isinstance(type, str) else type
        datasets = [{"path": path, "type": name} for name in types]
        config = config_of(method, tmp_path, datasets=datasets, shuffle_merged_datasets=False, **changes)
        return load_preference_rows(config, tokenizer or make_chat_tokenizer())

    return run


def with_template(text):
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
COUNTS = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>OPENED{% else %}<|im_end|>{% endif %}"
)

THINKS = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% else %}A{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}E{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A<think>{% endif %}"
)


@pytest.mark.parametrize(("row", "type", "template", "expected"), [
    ({**CHAT, "chosen": [assistant("Yes", reasoning_content="hm")]}, "passthrough", THINKS,
     ("UHiA", "<think>hm</think>YesE", "No!E")),
    (PAIR, "passthrough", None, ("Hi", "Yes<|endoftext|>", "No!<|endoftext|>")),
    ({**PAIR, "chosen": "Yes<|endoftext|>"}, "passthrough", None, ("Hi", "Yes<|endoftext|>", "No!<|endoftext|>")),
    (CHAT, "passthrough", None, (START, "Yes<|im_end|>\n", "No!<|im_end|>\n")),
    (QUESTION, "chatml.intel", None, (START, "Yes<|im_end|><|endoftext|>", "No!<|im_end|><|endoftext|>")),
    # Templates that render the prompt differently before a completion.
    *((CHAT, "passthrough", COUNTS.replace("OPENED", opened),
       ("2<|im_start|>Hi<|im_start|>", "Yes<|im_end|>", "No!<|im_end|>")) for opened in ("<think>", "")),
])  # fmt: skip
def test_the_ids_of_a_pair(load, row, type, template, expected):
    tokenizer = with_template(template) if template else make_chat_tokenizer()
    (found,) = load([row], type=type, tokenizer=tokenizer).train
    assert list(found) == ["prompt_ids", "chosen_ids", "rejected_ids"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in expected]  # a token for each byte
    assert list(found.values()) == ids


def test_unusable_rows_are_dropped_and_counted(load):
    others = {"prompt": " "}, {"chosen": None}, {"rejected": "x" * 40}, {"rejected": PAIR["chosen"]}
    found = load([PAIR, *({**PAIR, **other} for other in others)], sequence_len=40)
    assert str(found.reports[0]) == (
        f"datasets: 5 documents produced 2 rows (1 {EQUAL}); dropped 1 without a prompt, 1 without a completion (or "
        "with only one of chosen and rejected), 1 whose prompt and completions do not fit within sequence_len"
    )


LONGER = {**CHAT, "rejected": [*CHAT["rejected"], *CHAT["prompt"], *CHAT["rejected"]]}


@pytest.mark.parametrize(("row", "method", "template", "message"), [
    ({"prompt": "Hi", "completion": "a", "label": "yes"}, "kto", None,
     "rows.jsonl, train: transform 'passthrough', row 0: label must be true .* or false, got 'yes'"),
    (LONGER, "dpo", COUNTS.replace("{% else %}<|im_end|>", ""),
     "renders the messages before the completions differently before each of them"),
])  # fmt: skip
def test_rows_that_cannot_be_used(load, row, method, template, message):
    with pytest.raises(DataError, match=message):
        load([row], method, tokenizer=with_template(template) if template else None)


def test_markers_of_a_text_format_that_are_split_give_one_warning(load):
    def markers(types, tokenizer):
        rows = [{"question": "b", "prompt": "b", "chosen": "c", "rejected": "Hi"}]
        _, found = warned(load, rows, type=types, tokenizer=tokenizer)
        return [message for message in found if "the vocabulary lacks" in message]

    without = space_tokenizer("never")
    (message,) = markers(["chatml.intel", "chatml.prompt_pairs"], without)
    assert message.startswith("datasets.type: chatml.intel writes <|im_start|>, <|im_end|>, which the vocabulary lacks")
    assert 'tokens: ["<|im_start|>", "<|im_end|>"]' in message
    assert "lora_modules_to_save: [embed_tokens, lm_head]" in message
    without.chat_template = make_chat_tokenizer().chat_template  # warned of when it is set
    assert markers(["chatml.intel"], without) == []
