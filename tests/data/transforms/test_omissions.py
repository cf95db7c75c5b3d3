"""What chat templates leave out of a conversation, and is not an error."""

import pytest

from ebft.data.load import load_token_rows
from ebft.data.row_counts import LEFT_OUT, UNTHINKING
from tests.data.conftest import assistant, config_of, user
from tests.data.rendering.expected import Chat, tokenizer_of
from tests.data.rendering.rows import loaded, raw_row

ASK, SAY = user("w7 Zq"), assistant("w8 Zq")


def rows_of(method, template, row):
    """The texts of a row of a data file for each method, and of the replies that are trained on or compared."""
    tokenizer = tokenizer_of(f"trl/{template}")
    found = loaded(method, f"trl/{template}", row if isinstance(row, dict) else raw_row(method, Chat(row)))
    return [(tokenizer.decode(f.ids), [tokenizer.decode(f.ids[slice(*span)]) for span in f.spans]) for f in found]


TALK = [
    *(ASK, assistant("<think>\nt9 Zq\n</think>\n\nw8 Zq"), user("u2 Zq"), assistant("<think>t3 Zq</think>e")),
]


def test_thinking_of_earlier_turns_is_counted(write_jsonl, capsys):
    path = write_jsonl([{"messages": TALK}] * 3)
    for type, counts, count in (
        ("chat_template", {UNTHINKING: 3}, 3),
        ("ebft_strided_chat.transform_all_turns", {LEFT_OUT: 3}, 6),
    ):
        rows = load_token_rows(config_of(type, path=path, sequence_len=4096), tokenizer_of("trl/qwen3"))
        assert rows.reports[0].counts == counts and len(rows.train) == count
    assert f"produced 3 rows (3 {UNTHINKING})" in capsys.readouterr().err


START = "<|im_start|>user\nw7 Zq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("method", ["sft", "strided", "multiturn", "dpo", "kto", "reward_model"])
def test_the_role_developer(method):
    told = {"role": "developer", "content": "d1 Zq"}
    with pytest.warns(UserWarning, match="does not render the role developer; .* as system messages"):
        found = rows_of(method, "qwen3", [told, ASK, SAY])
    assert all(text.startswith("<|im_start|>system\nd1 Zq<|im_end|>\n" + START) for text, _ in found)
