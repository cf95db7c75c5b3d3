"""`ebft.mask_thinking_ce`: which tokens of a strided row lose their label, and that nothing else changes."""

import pytest
from datasets import Dataset

from ebft.data.apply import tokenise
from ebft.data.load import load_datasets

REPLY = "<think>\nTwo and two.\n</think>\n\nFour."
CHAT = [
    {"role": "user", "content": "Is <think>this</think> a tag?"},
    {"role": "assistant", "content": "<think>hm</think>Yes."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": REPLY},
]
STRIDED_CHATS = ["ebft_strided_chat.transform_last_turn", "ebft_reasoning.transform_strided"]


@pytest.fixture
def run(make_config, chatml):
    def run(type, row, mask, **keys):
        config = make_config("unused", type, ebft={"mode": "strided", "mask_thinking_ce": mask}, **keys)
        return tokenise(Dataset.from_list([row]), config.datasets[0], config, chatml)[0]

    return run


def learned(tokenizer, row):
    return tokenizer.decode([label for label in row["labels"] if label != -100])


@pytest.mark.parametrize("type", STRIDED_CHATS)
def test_chats(run, chatml, type):
    plain, masked = (run(type, {"messages": CHAT}, mask) for mask in (False, True))
    assert learned(chatml, plain) == f"{REPLY}<|im_end|>\n"
    assert learned(chatml, masked) == "Four.<|im_end|>\n"
    for field in ("input_ids", "prompt_length"):
        assert masked[field] == plain[field]
    assert chatml.decode(masked["input_ids"][masked["prompt_length"] :]).startswith("<think>")


@pytest.mark.filterwarnings("ignore:train_on_inputs")
def test_every_reply_but_no_prompt(run, chatml):
    row = run("chat_template", {"messages": CHAT}, True)
    assert learned(chatml, row) == "Yes.<|im_end|>\nFour.<|im_end|>\n"
    row = run("ebft_strided_chat.transform", {"messages": CHAT}, True, train_on_inputs=True)
    assert "Is <think>this</think> a tag?" in learned(chatml, row) and "Two and two" not in learned(chatml, row)


def test_a_prompt_that_opens_the_block(run, chatml):
    """Templates of some models end the generation prompt with the opening tag."""
    chatml.chat_template = chatml.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    row = run("ebft_strided_chat.transform", {"messages": CHAT[2:]}, True)
    assert learned(chatml, row) == "Four.<|im_end|>\n"
    assert chatml.decode(row["input_ids"][: row["prompt_length"]]).endswith("assistant\n<think>\n")


def test_separate_reasoning_is_rendered(run, chatml):
    reply = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    row = run("ebft_reasoning.transform_strided", {"messages": [CHAT[2], reply]}, False)
    assert learned(chatml, row) == f"{REPLY}<|im_end|>\n"


def test_pairs(run, chatml):
    row = {"input": "2+2?", "output": REPLY}
    plain, masked = (run("ebft_strided_structured.transform", row, mask) for mask in (False, True))
    assert learned(chatml, plain) == f"{REPLY}<|end|>" and learned(chatml, masked) == "Four.<|end|>"
    assert masked["input_ids"] == plain["input_ids"] and masked["prompt_length"] == plain["prompt_length"]


def test_a_row_cut_within_its_thinking_is_kept(make_config, write_jsonl, chatml):
    long = f"<think>{'so ' * 100}</think>Four."
    path = write_jsonl([{"messages": [CHAT[2], {"role": "assistant", "content": long}]}])
    ebft = {"mode": "strided", "mask_thinking_ce": True}
    train, _ = load_datasets(make_config(path, STRIDED_CHATS[0], ebft=ebft, sequence_len=96), chatml)
    assert len(train[0]["input_ids"]) == 96 and set(train[0]["labels"]) == {-100}
