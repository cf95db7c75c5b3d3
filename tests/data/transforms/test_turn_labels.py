"""Which tokens of a chat SFT trains on, word by word, and compared with the masks of TRL's training templates."""

import pytest

from ebft.data.row_counts import UNKNOWN, RowCounts
from ebft.errors import DataError
from tests.data.conftest import CHATML, assistant, tokenised, user

WORDS = ["Hi", "Hello", "Bye", "Goodbye", "Be", "brief", "<think>", "hm", "</think>", "system", "user", "assistant"]
SYSTEM = {"role": "system", "content": "Be brief"}
CHAT = [SYSTEM, user("Hi"), assistant("Hello"), user("Bye"), assistant("Goodbye"), user("Hi")]
BOT = [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]
THOUGHT = [*CHAT[:2], assistant("<think> hm </think> Hello")]
NAMES = {"roles": {"user": ["customer"], "assistant": ["bot"]}}
EMPTY = assistant(" ")
MASKED = {"ebft": {"mask_thinking_ce": True}}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", "mask_thinking_ce": True}}
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
    """`trained(messages, entry={...})`: the words of a row, those trained on in brackets and turns in parentheses."""

    def run(messages, entry=None, type="chat_template", **keys):
        row = messages if isinstance(messages, dict) else {"messages": messages}
        (row,) = tokenised(tokenizer, type, row, entry=entry, **keys)
        words = [tokenizer.convert_ids_to_tokens(token) for token in row["input_ids"]]
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"]))
        shown = [word if label == -100 else f"[{word}]" for word, label in zip(words, row["labels"])]
        assert row["prompt_length"] == row["turn_spans"][-1][0]
        for start, end in reversed(row["turn_spans"]):
            shown[start:end] = ["(", *shown[start:end], ")"]
        text = " ".join(word for word in shown if word != "<|im_start|>").replace("<|im_end|>", "END")
        return text.replace("system Be brief END user Hi END assistant", "PROMPT")

    return run


def learned(*marks):
    return [{**message, "learn": mark} for message, mark in zip(CHAT, [*marks, *[None] * 6])]


BYE, GOODBYE = "user Bye END assistant", "( [Goodbye] [END] )"
USUAL = f"PROMPT ( [Hello] [END] ) {BYE} {GOODBYE}"
OF_USER = (
    "system Be brief END user ( [Hi] [END] ) assistant Hello END user ( [Bye] [END] ) assistant Goodbye END "
    "user ( [Hi] [END] )"
)
ALL = f"system Be brief [END] user Hi [END] assistant ( [Hello] [END] ) user Bye [END] assistant {GOODBYE}"
OF_BOTH = (
    "system Be brief END user ( [Hi] [END] ) assistant ( [Hello] [END] ) user ( [Bye] [END] ) "
    "assistant ( [Goodbye] [END] ) user ( [Hi] [END] )"
)
OF_HI = f"system Be brief END user ( [Hi] [END] ) assistant Hello END {BYE} {GOODBYE}"


@pytest.mark.parametrize(("messages", "entry", "keys", "expected"), [
    (CHAT, {}, {}, USUAL),
    ([*CHAT, EMPTY], {}, {}, USUAL),
    ({"prompt": CHAT[:4], "completion": CHAT[4:5]}, {}, {}, f"PROMPT Hello END {BYE} {GOODBYE}"),
    ({"prompt": CHAT[:2], "completion": CHAT[2:]}, {}, {}, USUAL),
    *((CHAT, {key: "all"}, {}, ALL) for key in ("train_on_eos", "train_on_eot")),
    (CHAT, {"train_on_eos": "last"}, {}, f"PROMPT ( [Hello] END ) {BYE} {GOODBYE}"),
    (CHAT, {"train_on_eos": "none"}, {}, f"PROMPT ( [Hello] END ) {BYE} ( [Goodbye] END )"),
    (CHAT, {"roles_to_train": ["user"]}, {}, OF_USER),
    (CHAT, {"roles_to_train": ["human", "gpt"]}, {}, OF_BOTH),
    (CHAT, {}, {"roles_to_train": ["user"]}, OF_USER),
    (CHAT, {"roles_to_train": ["user"], "train_on_eos": "none"}, {}, OF_USER.replace("[END] )", "END )")),
    (BOT, {**NAMES, "roles_to_train": ["customer"]}, {}, "user ( [Hi] [END] )"),
    (learned(None, True, False), LEARN, {}, OF_HI),
    (CHAT[2:5], {}, {}, f"assistant Hello END {BYE} {GOODBYE}"),
    ([{**CHAT[2], "learn": True}, *CHAT[3:5]], LEARN, {}, f"assistant ( [Hello] [END] ) {BYE} {GOODBYE}"),
    (CHAT[1:3], {}, {"train_on_inputs": True},
     "[<|im_start|>] [user] [Hi] [END] [<|im_start|>] [assistant] ( [Hello] [END] )"),
    (THOUGHT, {"train_on_eos": "none"}, MASKED, "PROMPT ( <think> hm </think> [Hello] END )"),
    ([*THOUGHT, *CHAT[3:5]], {}, STRIDED,
     f"PROMPT ( <think> hm </think> [Hello] [END] ) {BYE} {GOODBYE}"),
    (CHAT, {"train_on_eos": "last", "roles_to_train": ["user", "assistant"]}, STRIDED,
     OF_BOTH.replace("[END] )", "END )", 4)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:datasets.0.train_on_eos")
def test_words(trained, messages, entry, keys, expected):
    for type in ("chat_template", *(["ebft_strided_chat.transform"] if "rl" in keys else [])):
        assert trained(messages, entry, type, **keys) == expected


@pytest.mark.parametrize("end", ["", "\n\n"])
def test_a_template_without_an_end_of_turn(trained, tokenizer, end):
    tokenizer.chat_template = "{% for m in messages %} {{ m.content }}END{% endfor %}".replace("END", end)
    with pytest.warns(UserWarning, match="chat template of the tokenizer writes nothing after a reply"):
        assert trained(CHAT[1:3]) == "Hi ( [Hello] )"
    with pytest.raises(DataError, match="train_on_eos: none needs a chat template that ends turns"):
        trained(CHAT[1:3], {"train_on_eos": "none"})


def test_a_template_that_starts_replies_with_thinking(trained, tokenizer, recwarn):
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert "( [hm] [</think>] [Hello] [END] )" in trained([CHAT[1], assistant("<think>\nhm\n</think> Hello")])
    assert not recwarn
    with pytest.warns(
        UserWarning, match="starts new replies with .*<think>.*, but renders replies of the rows without"
    ):
        trained(CHAT[1:3])


def test_text_that_the_tokenizer_does_not_know_is_counted(tokenizer):
    counts = RowCounts()
    tokenised(tokenizer, "completion", {"text": "Hi"}, {"text": "Hi Gödel"}, counts=counts)
    assert counts.documents[UNKNOWN] == [1]
