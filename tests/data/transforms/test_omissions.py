"""What chat templates leave out of a conversation is an error, or counted in the report."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import trl

from ebft.data.load import load_token_rows
from ebft.data.omissions import Omissions
from ebft.data.rendering import ChatTemplate
from ebft.data.row_counts import LEFT_OUT, UNTHINKING
from ebft.errors import DataError
from tests.data.conftest import assistant, config_of, user
from tests.data.rendering.expected import Chat, tokenizer_of
from tests.data.rendering.rows import loaded, raw_row
from tests.structured.conftest import make_chat_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
ASK, SAY = user("w7 Zq"), assistant("w8 Zq")
THINKS = assistant("<think>\nt9 Zq\n</think>\n\nw8 Zq")
KINDS = {
    "thinking": [ASK, THINKS],
    "thinking in two turns": [ASK, THINKS, user("u2 Zq"), assistant("<think>t3 Zq</think>e")],
    "reasoning_content": [ASK, {**SAY, "reasoning_content": "t9 Zq"}],
    "key thinking": [ASK, {**SAY, "thinking": "t9 Zq"}],
    "unknown role": [ASK, {"role": "critic", "content": "c1 Zq"}, SAY],
}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("deepseek_r1_distill", "thinking", "omits the thinking of message 1 .assistant. in its key content"),
        ("deepseek_r1_distill_training", "thinking", None),
        ("qwen3", "thinking in two turns", None),
        ("qwen2_5", "reasoning_content", "in its key reasoning_content, .*set `template_thinking_key: content`"),
        ("qwen2_5", "key thinking", "`template_thinking_key: content` and `field_thinking: thinking` of the dataset"),
        ("qwen3", "key thinking", None),  # passed under the key that the template reads
        ("gptoss", "reasoning_content", None),
        ("qwen2_5", "unknown role", "omits the content of message 1 .critic. .* `roles: {assistant: .critic.}`"),
    ],
)
def test_errors(name, kind, message):
    tokenizer = make_chat_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    with nullcontext() if message is None else pytest.raises(DataError, match=message):
        Omissions(name).check(KINDS[kind], ChatTemplate(tokenizer, name), {1, 3})


def rows_of(method, template, row):
    """The texts of a row of a data file for each method, and of the replies that are trained on or compared."""
    tokenizer = tokenizer_of(f"trl/{template}")
    found = loaded(method, f"trl/{template}", row if isinstance(row, dict) else raw_row(method, Chat(row)))
    return [(tokenizer.decode(f.ids), [tokenizer.decode(f.ids[slice(*span)]) for span in f.spans]) for f in found]


def test_thinking_of_earlier_turns_is_counted(write_jsonl, capsys):
    path = write_jsonl([{"messages": KINDS["thinking in two turns"]}] * 3)
    for type, counts, count in (
        ("chat_template", {UNTHINKING: 3}, 3),
        ("ebft_strided_chat.transform_all_turns", {LEFT_OUT: 3}, 6),
    ):
        rows = load_token_rows(config_of(type, path=path, sequence_len=4096), tokenizer_of("trl/qwen3"))
        assert rows.reports[0].counts == counts and len(rows.train) == count
    assert f"produced 3 rows (3 {UNTHINKING})" in capsys.readouterr().err


TALK = "<|im_start|>user\nw7 Zq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("method", ["sft", "strided", "multiturn", "dpo", "kto", "reward_model"])
def test_the_role_developer(method):
    told = {"role": "developer", "content": "d1 Zq"}
    with pytest.warns(UserWarning, match="does not render the role developer; .* as system messages"):
        found = rows_of(method, "qwen3", [told, ASK, SAY])
    assert all(text.startswith("<|im_start|>system\nd1 Zq<|im_end|>\n" + TALK) for text, _ in found)
