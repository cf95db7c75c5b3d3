"""Which tokens of a chat SFT trains on, word by word, and compared with the masks of TRL's training templates."""

from pathlib import Path

import pytest

from ebft.errors import DataError
from tests.data.conftest import CHATML, assistant, tokenised, user
from tests.structured.conftest import make_chat_tokenizer

WORDS = ["Hi", "Hello", "Bye", "Goodbye", "Be", "brief", "<think>", "hm", "</think>", "system", "user", "assistant"]
SYSTEM = {"role": "system", "content": "Be brief"}
CHAT = [SYSTEM, user("Hi"), assistant("Hello"), user("Bye"), assistant("Goodbye"), user("Hi")]
BOT = [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]
THOUGHT = [*CHAT[:2], assistant("<think> hm </think> Hello")]
NAMES = {"roles": {"user": ["customer"], "assistant": ["bot"]}}
EMPTY, SILENT = assistant(" "), assistant(None)
MASKED, STRIDED = {"ebft": {"mask_thinking_ce": True}}, {"rl": "ebft", "ebft": {"mode": "strided"}}
LEARN = {"message_field_training": "learn"}


@pytest.fixture
def tokenizer():
    """A tokenizer of one token per word; white space is no token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<|im_end|>", "<|im_start|>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    options = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


@pytest.fixture
def trained(tokenizer):
    """`trained(messages, entry={...})`: the words of a row without those of PROMPT, those trained on in brackets."""

    def run(messages, entry=None, type="chat_template", **keys):
        (row,) = tokenised(tokenizer, type, {"messages": messages}, entry=entry, **keys)
        words = [tokenizer.convert_ids_to_tokens(token) for token in row["input_ids"]]
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"]))
        shown = [word if label == -100 else f"[{word}]" for word, label in zip(words, row["labels"])]
        if keys.get("rl"):  # strided mode: where the anchors can be
            for start, end in reversed(row["turn_spans"]):
                shown[start:end] = ["(", *shown[start:end], ")"]
        text = " ".join(word for word in shown if word != "<|im_start|>").replace("<|im_end|>", "END")
        return text.replace("system Be brief END user Hi END assistant", "PROMPT")

    return run


def learned(*marks):
    return [{**message, "learn": mark} for message, mark in zip(CHAT, [*marks, *[None] * 6])]


USUAL = "PROMPT [Hello] [END] user Bye END assistant [Goodbye] [END]"
OF_USER = (
    "system Be brief END user [Hi] [END] assistant Hello END user [Bye] [END] assistant Goodbye END user [Hi] [END]"
)
# With the turns of strided mode.
ALL = "system Be brief [END] user Hi [END] assistant ( [Hello] [END] ) user Bye [END] assistant ( [Goodbye] [END] )"
OF_BOTH = (
    "system Be brief END user ( [Hi] [END] ) assistant ( [Hello] [END] ) user ( [Bye] [END] ) "
    "assistant ( [Goodbye] [END] ) user ( [Hi] [END] )"
)


def without_turns(text):
    return text.replace("( ", "").replace(" )", "")


@pytest.mark.parametrize(
    ("messages", "entry", "keys", "expected"),
    [
        (CHAT, {}, {}, USUAL),
        ([*CHAT, EMPTY], {}, {}, USUAL),
        ([*CHAT, SILENT, CHAT[5], SILENT], {}, {}, USUAL),
        ([*CHAT[:2], assistant(""), *CHAT[3:]], {}, {}, "PROMPT END user Bye END assistant [Goodbye] [END]"),
        *((CHAT, {key: "turn"}, {}, USUAL) for key in ("train_on_eos", "train_on_eot")),
        *((CHAT, {key: "all"}, {}, without_turns(ALL)) for key in ("train_on_eos", "train_on_eot")),
        (CHAT, {"train_on_eos": "last"}, {}, "PROMPT [Hello] END user Bye END assistant [Goodbye] [END]"),
        (CHAT, {"train_on_eos": "none"}, {}, "PROMPT [Hello] END user Bye END assistant [Goodbye] END"),
        (CHAT, {"roles_to_train": ["user"]}, {}, OF_USER),
        (CHAT, {"roles_to_train": ["human", "gpt"]}, {}, without_turns(OF_BOTH)),
        (CHAT, {"roles_to_train": ["system"]}, {}, "system [Be] [brief] [END]"),
        (CHAT, {}, {"roles_to_train": ["user"]}, OF_USER),
        (CHAT, {"roles_to_train": ["assistant"]}, {"roles_to_train": ["user"]}, USUAL),
        (CHAT, {"roles_to_train": ["user"], "train_on_eos": "none"}, {}, OF_USER.replace("[END]", "END")),
        (BOT, NAMES, {}, "user Hi END assistant [Hello] [END]"),
        (BOT, {**NAMES, "roles_to_train": ["customer"]}, {}, "user [Hi] [END]"),
        (learned(None, True, False), LEARN, {},
         "system Be brief END user [Hi] [END] assistant Hello END user Bye END assistant [Goodbye] [END]"),
        (learned(None, 1, 0), LEARN, {},
         "system Be brief END user [Hi] [END] assistant Hello END user Bye END assistant [Goodbye] [END]"),
        (learned(None, True), {**LEARN, "roles_to_train": []}, {}, "system Be brief END user [Hi] [END]"),
        (CHAT[2:5], {}, {}, "assistant Hello END user Bye END assistant [Goodbye] [END]"),
        ([{**CHAT[2], "learn": True}, *CHAT[3:5]], LEARN, {},
         "assistant [Hello] [END] user Bye END assistant [Goodbye] [END]"),
        (CHAT[1:3], {}, {"train_on_inputs": True},
         "[<|im_start|>] [user] [Hi] [END] [<|im_start|>] [assistant] [Hello] [END]"),
        (THOUGHT, {"train_on_eos": "none"}, MASKED, "PROMPT <think> hm </think> [Hello] END"),
        ([*THOUGHT, *CHAT[3:5]], {}, {"rl": "ebft", "ebft": {"mode": "strided", "mask_thinking_ce": True}},
         "PROMPT ( <think> hm </think> [Hello] [END] ) user Bye END assistant ( [Goodbye] [END] )"),
    ],
)  # fmt: skip
def test_words(trained, messages, entry, keys, expected):
    assert trained(messages, entry, **keys) == expected


@pytest.mark.filterwarnings("ignore:datasets.0.train_on_eos")
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, "PROMPT ( [Hello] [END] ) user Bye END assistant ( [Goodbye] [END] )"),
        ({"train_on_eos": "none"}, "PROMPT ( [Hello] ) END user Bye END assistant ( [Goodbye] ) END"),
        ({"train_on_eos": "last"}, "PROMPT ( [Hello] ) END user Bye END assistant ( [Goodbye] [END] )"),
        ({"train_on_eos": "all"}, ALL),
        ({"roles_to_train": ["user", "assistant"]}, OF_BOTH),
    ],
)
@pytest.mark.parametrize("type", ["chat_template", "ebft_strided_chat.transform"])
def test_turns_of_strided_mode(trained, type, entry, expected):
    assert trained(CHAT, entry, type, **STRIDED) == expected


def test_what_cannot_be_labelled(trained):
    with pytest.raises(DataError, match=r"'learn' \(message_field_training\) must be true or false, got 'yes'"):
        trained(learned("yes"), LEARN)


@pytest.mark.filterwarnings("ignore:chat template of the tokenizer writes nothing")
@pytest.mark.parametrize("end", ["", "\n\n"])
def test_a_template_without_an_end_of_turn(trained, tokenizer, end):
    tokenizer.chat_template = "{% for m in messages %} {{ m.content }}END{% endfor %}".replace("END", end)
    assert trained(CHAT[1:3]) == "Hi [Hello]"
    with pytest.raises(DataError, match="train_on_eos: none needs a chat template that ends turns"):
        trained(CHAT[1:3], {"train_on_eos": "none"})


@pytest.mark.parametrize(("name", "header"), [("llama3", ""), ("qwen2_5", "\n")])
def test_the_masks_are_those_of_trl(name, header):
    """TRL's template for Qwen also trains on the line break before an answer, which is part of the prompt here."""
    import trl
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = make_chat_tokenizer()  # one token per byte
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    (row,) = tokenised(tokenizer, "chat_template", {"messages": CHAT[:5]})
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    template = get_training_chat_template(tokenizer)
    theirs = tokenizer.apply_chat_template(CHAT[:5], chat_template=template, **options)
    assert row["input_ids"] == theirs["input_ids"]
    ours = "".join("." if label == -100 else "x" for label in row["labels"])
    of_trl = "".join(".x"[mark] for mark in theirs["assistant_masks"])
    assert "x" * len("Hello") in ours and ours == (of_trl.replace(".x", "..") if header else of_trl)
