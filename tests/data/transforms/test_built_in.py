"""Fields of the built-in transforms, checked against the tokenizer."""

import pytest

from ebft.data.load import load_token_rows
from tests.data.conftest import CHATML, assistant, tokenised, user

PRETRAIN, PAIRS, CHATS = "ebft_pretrain.transform", "ebft_strided_structured.transform", "ebft_strided_chat.transform"


@pytest.fixture
def run(tokenizer):
    """`run(type, rows, field=None, template=None)`: the columns of rows of strided mode."""

    def run(type, *rows, field=None, template=None, **keys):
        tokenizer.chat_template = template
        keys = {"rl": "ebft", "ebft": {"mode": "strided"}, "sequence_len": 64, **keys}
        return tokenised(tokenizer, type, *rows, entry={"field": field} if field else {}, **keys)[:]

    yield run
    tokenizer.chat_template = None


def test_texts(run, tokenizer):
    out = run(PRETRAIN, {"text": "def f():"}, {"text": None})
    ids = tokenizer("def f():")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and out["input_ids"] == out["labels"] == [ids, []]
    assert out["prompt_length"] == [0, 0] and out["document"] == [0, 1]
    assert run("completion", {"text": "def f():"})["input_ids"] == [[*ids, tokenizer.eos_token_id]]


QUESTION = {"question": "x = 1\n", "answer": "y = 2"}


@pytest.mark.parametrize(("row", "field", "text"), [
    ({"content": "z = 3"}, None, "z = 3"),
    ({"code": "z = 3"}, "code", "z = 3"),
    (QUESTION, None, "x = 1\ny = 2"),
    ({"prompt": "x = 1\n", "answer": "y = 2"}, None, "x = 1\ny = 2"),
    (QUESTION, "question", "x = 1\n"),
    ({**QUESTION, "text": "z = 3"}, None, "z = 3"),
])  # fmt: skip
def test_columns_of_texts(run, tokenizer, row, field, text):
    assert run(PRETRAIN, row, field=field)["input_ids"] == [tokenizer(text)["input_ids"]]


@pytest.mark.parametrize(("row", "prompt"), [
    ({"input": "Say hel", "output": "lo"}, "Say hel"),
    ({"prompt": "Say hel", "completion": "lo"}, "Say hel"),
    ({"instruction": "Say hel", "input": "", "output": "lo"}, "Say hel"),
    ({"instruction": "Add.", "input": "1 2", "output": "lo"}, "Add.\n\n1 2"),
])  # fmt: skip
def test_the_boundary_of_pairs_is_exact(run, tokenizer, row, prompt):
    out, prompt = run(PAIRS, row), tokenizer(prompt)["input_ids"]
    completion = tokenizer("lo", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert out["input_ids"] == [prompt + completion] and out["prompt_length"] == [len(prompt)]
    assert out["labels"] == [[-100] * len(prompt) + completion]


@pytest.mark.filterwarnings("ignore:train_on_inputs")
@pytest.mark.parametrize(("type", "rows"), [
    (PAIRS, [{"input": "Say hel", "output": "lo"}, {"prompt": "Say hel", "completion": "lo"}]),
    (PRETRAIN, [{"text": "Say hello"}, {"content": "Say hello"}, {"question": "Say hel", "answer": "lo"}]),
    (CHATS, [{"messages": [user("Hi"), assistant("Yo")]}, {"prompt": [user("Hi")], "ground_truth": "Yo"}]),
])  # fmt: skip
def test_rows_of_different_shapes_in_one_source(run, type, rows):
    columns = {name: None for row in rows for name in row}
    alone = [run(type, row, template=CHATML)["input_ids"][0] for row in rows]
    assert run(type, *(columns | row for row in rows), template=CHATML)["input_ids"] == alone


def test_pairs_with_all_labels_or_none(run):
    out = run(PAIRS, {"input": "a", "output": "b"}, train_on_inputs=True)
    assert out["labels"] == out["input_ids"]
    assert run(PAIRS, {"input": "a", "output": None})["input_ids"] == []


CHAT = [user("Hi"), assistant("Hello"), user("Bye"), assistant("Goodbye"), user("Left out")]
GREETING = assistant("Yes?")


@pytest.mark.parametrize("type", ["ebft_strided_chat.transform_all_turns", "ebft_chat_multiturn.transform_all_turns"])
@pytest.mark.filterwarnings("ignore:datasets.type")
def test_a_row_of_every_answer(run, tokenizer, type):
    """The rows of a chat that ends with that answer; a chat without an answer is dropped."""
    chats = [CHAT, [GREETING, *CHAT[:2]], CHAT[:1], [GREETING]]
    out = run(type, *({"messages": messages} for messages in chats), template=CHATML)
    alone = [{"messages": chat} for chat in (CHAT[:2], CHAT[:4], [GREETING, *CHAT[:2]])]
    wanted = run("ebft_strided_chat.transform_last_turn", *alone, template=CHATML)
    assert out["document"] == [0, 0, 1]
    for field in ("input_ids", "labels", "prompt_length", "turn_spans"):
        assert out[field] == wanted[field]


REPLY = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.filterwarnings("ignore:train_on_inputs")
def test_thinking_without_labels(run, tokenizer):
    """`ebft.mask_thinking_ce`: thinking of replies loses its labels, tags in prompts do not."""

    def learned(type, row, mask=True, template=CHATML, **keys):
        found = run(type, row, template=template, ebft={"mode": "strided", "mask_thinking_ce": mask}, **keys)
        return tokenizer.decode([label for label in found["labels"][0] if label != -100]), found["input_ids"]

    pair = {"input": "2+2?", "output": REPLY}
    (plain, ids), (masked, same_ids) = (learned(PAIRS, pair, mask) for mask in (False, True))
    assert plain == f"{REPLY}<|end|>" and masked == "Four.<|end|>" and ids == same_ids
    asked = user("Is <think>this</think> a tag?")
    chat = {"messages": [asked, assistant("<think>hm</think>Yes."), user("2+2?"), assistant(REPLY)]}
    assert learned("chat_template", chat)[0] == "Yes.<|im_end|>\nFour.<|im_end|>\n"
    text, _ = learned(CHATS, chat, train_on_inputs=True)
    assert "Is <think>this</think> a tag?" in text and "Two and two" not in text
    # Templates of some models end the generation prompt with the opening tag.
    opening = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert learned(CHATS, {"messages": chat["messages"][2:]}, template=opening)[0] == "Four.<|im_end|>\n"


def test_a_row_cut_within_its_thinking_is_kept(make_config, write_jsonl, chatml):
    path = write_jsonl([{"messages": [user("2+2?"), assistant(f"<think>{'so ' * 100}</think>Four.")]}])
    ebft = {"mode": "strided", "mask_thinking_ce": True}
    config = make_config(path, "ebft_strided_chat.transform_last_turn", ebft=ebft, sequence_len=96)
    train = load_token_rows(config, chatml).train
    assert len(train[0]["input_ids"]) == 96 and set(train[0]["labels"]) == {-100}
