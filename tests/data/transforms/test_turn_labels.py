"""Which tokens of a chat SFT trains on, word by word, and compared with the masks of TRL's training templates."""

from pathlib import Path

import pytest

from ebft.config.schema import RunConfig
from ebft.data.apply import tokenise
from ebft.errors import DataError
from tests.structured.conftest import make_chat_tokenizer

WORDS = ["Hi", "Hello", "Bye", "Goodbye", "Be", "brief", "<think>", "hm", "</think>", "system", "user", "assistant"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Goodbye"},
    {"role": "user", "content": "Hi"},
]


def word_tokenizer(special):
    """A tokenizer of one token per word; white space is no token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", *special, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=special[0])


@pytest.fixture
def tokenizer():
    tokenizer = word_tokenizer(["<|im_end|>", "<|im_start|>"])
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def trained(tokenizer):
    """`trained(messages, entry={...})`: the words of a row, except im_start, those trained on in brackets."""

    def run(messages, entry=None, type="chat_template", **keys):
        from datasets import Dataset

        config = RunConfig.from_dict(
            {"base_model": "x", "datasets": [{"path": "x", "type": type, **(entry or {})}], **keys}
        )
        row = tokenise(Dataset.from_list([{"messages": messages}]), config.datasets[0], config, tokenizer)[0]
        words = [tokenizer.convert_ids_to_tokens(token) for token in row["input_ids"]]
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"]))
        shown = [word if label == -100 else f"[{word}]" for word, label in zip(words, row["labels"])]
        if config.method.samples_blocks:  # where the anchors can be
            for start, end in reversed(row["turn_spans"]):
                shown[start:end] = ["(", *shown[start:end], ")"]
        return " ".join(word for word in shown if word != "<|im_start|>").replace("<|im_end|>", "END")

    return run


PROMPT = "system Be brief END user Hi END assistant"


@pytest.mark.parametrize("empty", [{"role": "assistant", "content": " "}, {"role": "assistant", "content": None}])
def test_empty_replies_at_the_end_do_not_drop_the_turns_before(trained, empty):
    whole = trained(CHAT)
    assert trained([*CHAT, empty]) == whole and "[Goodbye]" in whole
    assert trained([*CHAT, empty, CHAT[5], empty]) == whole
    assert trained([*CHAT[:2], empty]) == trained(CHAT[:2])


def test_empty_replies_between_others_are_not_trained_on(trained):
    empty = {"role": "assistant", "content": ""}
    words = f"{PROMPT} END user Bye END assistant [Goodbye] [END]"
    assert trained([*CHAT[:2], empty, *CHAT[3:]]) == words


def test_a_single_turn(trained):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert trained(chat) == "user Hi END assistant [Hello] [END]"


def test_every_answer_and_its_end_by_default(trained):
    assert trained(CHAT) == f"{PROMPT} [Hello] [END] user Bye END assistant [Goodbye] [END]"


@pytest.mark.parametrize("key", ["train_on_eos", "train_on_eot"])
@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        ("turn", f"{PROMPT} [Hello] [END] user Bye END assistant [Goodbye] [END]"),
        (
            "all",
            "system Be brief [END] user Hi [END] assistant [Hello] [END] user Bye [END] assistant [Goodbye] [END]",
        ),
        ("last", f"{PROMPT} [Hello] END user Bye END assistant [Goodbye] [END]"),
        ("none", f"{PROMPT} [Hello] END user Bye END assistant [Goodbye] END"),
    ],
)
def test_ends_of_turns(trained, key, eos, expected):
    assert trained(CHAT, {key: eos}) == expected


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["assistant"], f"{PROMPT} [Hello] [END] user Bye END assistant [Goodbye] [END]"),
        (["user"], "system Be brief END user [Hi] [END] assistant Hello END user [Bye] [END] assistant Goodbye END "
                   "user [Hi] [END]"),
        (["human", "gpt"], "system Be brief END user [Hi] [END] assistant [Hello] [END] user [Bye] [END] assistant "
                           "[Goodbye] [END] user [Hi] [END]"),
        (["system"], "system [Be] [brief] [END]"),
    ],
)  # fmt: skip
def test_roles(trained, roles, expected):
    assert trained(CHAT, {"roles_to_train": roles}) == expected
    assert trained(CHAT, roles_to_train=roles) == expected


def test_a_dataset_overrides_the_roles_of_the_config(trained):
    shown = trained(CHAT, {"roles_to_train": ["assistant"]}, roles_to_train=["user"])
    assert shown == f"{PROMPT} [Hello] [END] user Bye END assistant [Goodbye] [END]"


def test_roles_and_ends_together(trained):
    expected = (
        "system Be brief END user [Hi] END assistant Hello END user [Bye] END assistant Goodbye END user [Hi] END"
    )
    assert trained(CHAT, {"roles_to_train": ["user"], "train_on_eos": "none"}) == expected


def test_a_role_with_its_name_in_the_data(trained):
    chat = [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]
    roles = {"user": ["customer"], "assistant": ["bot"]}
    assert trained(chat, {"roles": roles}) == "user Hi END assistant [Hello] [END]"
    assert trained(chat, {"roles": roles, "roles_to_train": ["customer"]}) == "user [Hi] [END]"


@pytest.mark.parametrize(("yes", "no"), [(True, False), (1, 0)])
def test_marked_messages(trained, yes, no):
    marks = [None, yes, no, None, None, None]
    chat = [{**message, "learn": mark} for message, mark in zip(CHAT, marks)]
    expected = "system Be brief END user [Hi] [END] assistant Hello END user Bye END assistant [Goodbye] [END]"
    assert trained(chat, {"message_field_training": "learn"}) == expected


def test_only_marked_messages(trained):
    chat = [{**message, "learn": mark} for message, mark in zip(CHAT, [None, True, None, None, None, None])]
    keys = {"message_field_training": "learn", "roles_to_train": []}
    assert trained(chat, keys) == "system Be brief END user [Hi] [END]"


def test_a_mark_that_is_neither(trained):
    chat = [{**message, "learn": "yes"} for message in CHAT]
    with pytest.raises(DataError, match=r"'learn' \(message_field_training\) must be true or false, got 'yes'"):
        trained(chat, {"message_field_training": "learn"})


def test_a_greeting_is_trained_on_if_it_is_marked(trained):
    greeting = {"role": "assistant", "content": "Hello"}
    assert trained([greeting, *CHAT[3:5]]) == "assistant Hello END user Bye END assistant [Goodbye] [END]"
    chat = [{**greeting, "learn": True}, *CHAT[3:5]]
    expected = "assistant [Hello] [END] user Bye END assistant [Goodbye] [END]"
    assert trained(chat, {"message_field_training": "learn"}) == expected


def test_inputs_are_trained_on_as_well(trained):
    shown = trained(CHAT[:3], train_on_inputs=True).replace("[<|im_start|>] ", "")
    assert shown == "[system] [Be] [brief] [END] [user] [Hi] [END] [assistant] [Hello] [END]"


def test_thinking_is_masked_inside_of_a_turn_without_its_end(trained):
    chat = [*CHAT[:2], {"role": "assistant", "content": "<think> hm </think> Hello"}]
    shown = trained(chat, {"train_on_eos": "none"}, ebft={"mask_thinking_ce": True})
    assert shown == f"{PROMPT} <think> hm </think> [Hello] END"


def test_a_role_whose_content_the_template_changes(trained, tokenizer):
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
    with pytest.raises(DataError, match="changes the content of a user turn.*Remove user from roles_to_train"):
        trained(CHAT, {"roles_to_train": ["user"]})


@pytest.mark.filterwarnings("ignore:chat template of the tokenizer writes nothing")
@pytest.mark.parametrize("end", ["", "\n\n"])
def test_a_template_without_an_end_of_turn(trained, tokenizer, end):
    tokenizer.chat_template = "{% for m in messages %} {{ m.content }}END{% endfor %}".replace("END", end)
    assert trained(CHAT[1:3]) == "Hi [Hello]"
    with pytest.raises(DataError, match="train_on_eos: none needs a chat template that ends turns"):
        trained(CHAT[1:3], {"train_on_eos": "none"})


@pytest.mark.filterwarnings("ignore:datasets.0.train_on_eos")
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, f"{PROMPT} ( [Hello] [END] ) user Bye END assistant ( [Goodbye] [END] )"),
        ({"train_on_eos": "none"}, f"{PROMPT} ( [Hello] ) END user Bye END assistant ( [Goodbye] ) END"),
        ({"train_on_eos": "last"}, f"{PROMPT} ( [Hello] ) END user Bye END assistant ( [Goodbye] [END] )"),
        (
            {"train_on_eos": "all"},
            "system Be brief [END] user Hi [END] assistant ( [Hello] [END] ) user Bye [END] assistant ( [Goodbye] "
            "[END] )",
        ),
        (
            {"roles_to_train": ["user", "assistant"]},
            "system Be brief END user ( [Hi] [END] ) assistant ( [Hello] [END] ) user ( [Bye] [END] ) assistant "
            "( [Goodbye] [END] ) user ( [Hi] [END] )",
        ),
    ],
)
@pytest.mark.parametrize("type", ["chat_template", "ebft_strided_chat.transform"])
def test_turns_of_strided_mode(trained, type, entry, expected):
    assert trained(CHAT, entry, type, rl="ebft", ebft={"mode": "strided"}) == expected


def test_turns_of_strided_mode_include_masked_thinking(trained):
    chat = [*CHAT[:2], {"role": "assistant", "content": "<think> hm </think> Hello"}, *CHAT[3:5]]
    shown = trained(chat, rl="ebft", ebft={"mode": "strided", "mask_thinking_ce": True})
    assert shown == f"{PROMPT} ( <think> hm </think> [Hello] [END] ) user Bye END assistant ( [Goodbye] [END] )"


@pytest.mark.parametrize(("name", "header"), [("llama3", ""), ("qwen2_5", "\n")])
def test_the_masks_are_those_of_trl(name, header):
    """TRL's template for Qwen also trains on the line break before an answer, which is part of the prompt here."""
    import trl
    from datasets import Dataset
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = make_chat_tokenizer()  # one token per byte
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    config = RunConfig.from_dict({"base_model": "x", "datasets": [{"path": "x", "type": "chat_template"}]})
    row = tokenise(Dataset.from_list([{"messages": CHAT[:5]}]), config.datasets[0], config, tokenizer)[0]
    theirs = tokenizer.apply_chat_template(
        CHAT[:5],
        chat_template=get_training_chat_template(tokenizer),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert row["input_ids"] == theirs["input_ids"]
    ours = "".join("." if label == -100 else "x" for label in row["labels"])
    assert "x" * len("Hello") in ours
    of_trl = "".join(".x"[mark] for mark in theirs["assistant_masks"])
    assert ours == (of_trl.replace(".x", "..") if header else of_trl)
