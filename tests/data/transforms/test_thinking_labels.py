"""`ebft.mask_thinking_ce`: which tokens of a strided row lose their label, and that nothing else changes."""

import pytest

from ebft.data.load import load_token_rows
from tests.data.conftest import assistant, tokenised, user

PAIRS = "ebft_strided_structured.transform"
REPLY = "<think>\nTwo and two.\n</think>\n\nFour."
CHAT = [user("Is <think>this</think> a tag?"), assistant("<think>hm</think>Yes."), user("2+2?"), assistant(REPLY)]


@pytest.fixture
def learned(chatml):
    """`learned(type, row, mask)`: the text of the labels, and the row."""

    def run(type, row, mask, **keys):
        ebft = {"mode": "strided", "mask_thinking_ce": mask}
        (found,) = tokenised(chatml, type, row, rl="ebft", ebft=ebft, sequence_len=64, **keys)
        return chatml.decode([label for label in found["labels"] if label != -100]), found

    return run


def test_the_reply_of_a_pair(learned, chatml):
    row = {"input": "2+2?", "output": REPLY}
    (plain, all_on), (masked, found) = (
        learned("ebft_strided_structured.transform", row, mask) for mask in (False, True)
    )
    assert plain == f"{REPLY}<|end|>" and masked == "Four.<|end|>"
    assert all(found[field] == all_on[field] for field in ("input_ids", "prompt_length"))


@pytest.mark.filterwarnings("ignore:train_on_inputs")
def test_every_reply_but_no_prompt(learned, chatml):
    assert learned("chat_template", {"messages": CHAT}, True)[0] == "Yes.<|im_end|>\nFour.<|im_end|>\n"
    text, _ = learned("ebft_strided_chat.transform", {"messages": CHAT}, True, train_on_inputs=True)
    assert "Is <think>this</think> a tag?" in text and "Two and two" not in text
    # Templates of some models end the generation prompt with the opening tag.
    chatml.chat_template = chatml.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    text, row = learned("ebft_strided_chat.transform", {"messages": CHAT[2:]}, True)
    assert text == "Four.<|im_end|>\n"
    assert chatml.decode(row["input_ids"][: row["prompt_length"]]).endswith("assistant\n<think>\n")


def test_a_row_cut_within_its_thinking_is_kept(make_config, write_jsonl, chatml):
    path = write_jsonl([{"messages": [CHAT[2], assistant(f"<think>{'so ' * 100}</think>Four.")]}])
    ebft = {"mode": "strided", "mask_thinking_ce": True}
    config = make_config(path, "ebft_strided_chat.transform_last_turn", ebft=ebft, sequence_len=96)
    train = load_token_rows(config, chatml).train
    assert len(train[0]["input_ids"]) == 96 and set(train[0]["labels"]) == {-100}
