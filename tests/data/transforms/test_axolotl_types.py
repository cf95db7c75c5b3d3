"""Fields of the transforms of pairs, segments and tools that configs of axolotl name."""

import pytest

from ebft.config.keys.data import DatasetEntry
from ebft.data.transforms.formats import written_prompt
from ebft.errors import DataError
from tests.data.conftest import tokenised


@pytest.fixture
def texts(tokenizer, chatml):
    """`texts(type, row)`: prompt and completion of a row for SFT, as text without the first token; the last is EOS."""

    def run(type, row, entry=None, chat=False, **keys):
        used = chatml if chat else tokenizer
        (found,) = tokenised(used, type, row, entry=entry, **keys)
        start = found["prompt_length"]
        assert found["labels"] == [-100] * start + found["input_ids"][start:]
        return tuple(used.decode(part) for part in (found["input_ids"][:start], found["input_ids"][start:]))

    return run


BELOW = "<|begin|>Below is an instruction that describes a task"
ALPACA = f"{BELOW}. Write a response that appropriately completes the request."
WITH_INPUT = (
    f"{BELOW}, paired with an input that provides further context. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
)
ALPACA += "\n\n### Instruction:\nAdd.\n\n### Response:\n"
ADD = {"instruction": "Add.", "output": "3"}
ASKED = {"question": "1+2?", "answer": "3"}


@pytest.mark.parametrize(("row", "prompt"), [
    ({"input": "1 2"}, WITH_INPUT), ({"input": ""}, ALPACA), ({"input": None}, ALPACA), ({}, ALPACA),
])  # fmt: skip
def test_alpaca(texts, row, prompt):
    assert texts("alpaca", {**ADD, **row}) == (prompt, "3<|end|>")
    renamed = {"q": "Add.", "i": row.get("input"), "a": "3"}
    assert texts("alpaca", renamed, {"field_instruction": "q", "field_input": "i", "field_output": "a"})[0] == prompt
    start = prompt.removeprefix("<|begin|>").partition("\n\n")[0]
    chat = "USER: Add.\n1 2\nASSISTANT:" if row.get("input") else "USER: Add.\nASSISTANT:"
    assert texts("alpaca:chat", {**ADD, **row}) == (f"<|begin|>SYSTEM: {start}\n{chat}", "3<|end|>")


@pytest.mark.parametrize(("type", "prompt"), [
    ("alpaca", ALPACA.removeprefix("<|begin|>")),
    ({"field_instruction": "t.en", "format": "[{instruction}] "}, "[Add.] "),
    ("completion", "Add."),
    ("chat_template", [{"role": "system", "content": "Sum."}, {"role": "user", "content": "Add."}]),
])  # fmt: skip
def test_how_inference_writes_a_question(type, prompt):
    keys = {"system_prompt": "Sum."} if type == "chat_template" else {}
    assert written_prompt([DatasetEntry(path="rows.jsonl", type=type, **keys)])("Add.") == prompt


@pytest.mark.parametrize("type", ["alpaca_chat", "alpaca_chat.load_qa"])
@pytest.mark.parametrize(("row", "question"), [
    (ASKED, "1+2?"), ({**ADD, "input": "1 2"}, "Add.\n\n1 2"), ({**ADD, "input": ""}, "Add."),
])  # fmt: skip
def test_alpaca_chat(texts, type, row, question):
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert texts(type, row, chat=True) == (prompt, "3<|im_end|>\n")
    system = "<|im_start|>system\nBe exact.<|im_end|>\n"
    assert texts(type, row, {"system_prompt": "Be exact."}, chat=True)[0] == system + prompt


@pytest.mark.parametrize(("keys", "row", "prompt"), [
    ({}, {**ADD, "input": "1 2"}, "Add.\n\n1 2"),
    ({"field_instruction": "t.en", "field_input": "t.i", "field_output": "t.de.x"},
     {"t": {"en": "Add.", "de": {"x": "3"}}}, "Add."),
    ({"field_instruction": "t.en", "field_output": "a"}, {"t.en": "Add.", "t": {"en": "no"}, "a": "3"}, "Add."),
    ({"format": "[{instruction}|{input}]"}, {**ADD, "input": "1 2"}, "[Add.|1 2]"),
    ({"format": "{input}", "no_input_format": "<{instruction}>"}, ADD, "<Add.>"),
    ({"format": "{{}} {instruction}", "field_input": "none"}, {"instruction": "{x}", "output": "3"}, "{} {x}"),
    ({"system_prompt": "Be exact. "}, ADD, "Be exact. Add."),
    ({"system_prompt": "Be kind. "}, {**ADD, "system": "Go. "}, "Go. Add."),
    ({"field_system": "s", "system_format": "<{system}>"}, {**ADD, "s": "A"}, "<A>Add."),
])  # fmt: skip
def test_a_format_of_the_config(texts, keys, row, prompt):
    for type, entry in ((keys, {}), ("user_defined", {"user_defined": keys})):
        assert texts(type, row, entry) == (f"<|begin|>{prompt}", "3<|end|>")


def test_rows_of_tokens_are_the_rows_that_they_were_made_of(tokenizer):
    turns = [{"text": text, "label": label} for text, label in zip("abcd", [False, True] * 2)]
    for type, given in (("input_output", {"segments": turns}), ("alpaca", ADD), ("completion", {"text": "one two"})):
        (row,) = tokenised(tokenizer, type, given)
        padded = {"input_ids": [0, *row["input_ids"]], "labels": [-100, *row["labels"]]}
        (found,) = tokenised(tokenizer, None, padded | {"attention_mask": [0] + [1] * len(row["labels"])})
        assert all(found[field] == row[field] for field in ("input_ids", "labels", "prompt_length")), type
        if type == "input_output":
            assert found["turn_spans"] == row["turn_spans"] == [[1, 2], [3, 4]]
    (found,) = tokenised(tokenizer, "tokens", {"input_ids": row["input_ids"]})
    assert found["labels"] == row["input_ids"] and found["prompt_length"] == 0
    masks = {"completion_mask": [0, 1, 1], "assistant_masks": [1, 0, 1]}
    (found,) = tokenised(tokenizer, "tokens", {"input_ids": [3, 4, 5], **masks})
    assert found["labels"] == [-100, -100, 5]
    for wrong, message in (({"labels": [3, 5]}, "label 5 of the token 4"), ({"input_ids": [3, 10**6]}, "has 1000000"),
                           ({"completion_mask": [1] * 3}, "but 0 labels"), ({"input_ids": "1 2"}, "a list of numbers"),
                           ({"input_ids": [3] * 3, "attention_mask": [1, 0, 1]}, "has gaps")):  # fmt: skip
        with pytest.raises(DataError, match=f"row 0: .*{message}"):
            tokenised(tokenizer, "tokens", {"input_ids": [3, 4], **wrong})


@pytest.fixture
def segments(tokenizer):
    """`segments([(text, label)])`: the tokens, each with whether it is trained on, and the length of the prompt."""

    def run(segments, **keys):
        row = {"segments": [{"text": text, "label": label} for text, label in segments]}
        (found,) = tokenised(tokenizer, "input_output", row, **keys)
        shown = [(token, label != -100) for token, label in zip(found["input_ids"], found["labels"])]
        return shown, found["prompt_length"]

    return run


def test_segments(segments, tokenizer):
    texts, labels = ("<|begin|>Q: ", "one", " two", "\n", "three<|end|>", "x"), (False, True, True, False, True, False)
    pieces = [(tokenizer(text, add_special_tokens=False)["input_ids"], label) for text, label in zip(texts, labels)]
    shown, prompt_length = segments([(texts[0], False), (None, True), *list(zip(texts, labels))[1:]])
    assert shown == [(token, label) for ids, label in pieces for token in ids]
    assert prompt_length == sum(len(ids) for ids, _ in pieces[:4])
    assert shown[0][0] == tokenizer.bos_token_id and shown[-2][0] == tokenizer.eos_token_id
    shown, prompt_length = segments([("one", True), (" two", True)])  # a text
    assert prompt_length == 0 and all(label for _, label in shown)
    assert all(label for _, label in segments([("one", False), (" two", True)], train_on_inputs=True)[0])
    for given in ([], [("one", False)], [("", True)]):  # no reference
        shown, prompt_length = segments(given)
        assert not any(label for _, label in shown) and (prompt_length == 0 or prompt_length >= len(shown))
