"""Faults that users of other projects reported, and that the comparison of whole rows does not contain.

The docstrings name the project and what was reported.
"""

import pytest

from ebft.data.load import load_token_rows
from ebft.data.row_counts import LEFT_OUT, UNTHINKING
from tests.data.conftest import assistant, config_of, user
from tests.data.rendering.expected import Chat, tokenizer_of
from tests.data.rendering.rows import rows_of

ASKED, REPLY = user("How many?"), assistant("Seven.")
RESULT = {"role": "tool", "content": "Cloudy.", "name": "get_weather"}
WEATHER = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}
WEATHER = {"type": "function", "function": WEATHER}


def calls(arguments):
    return assistant("", tool_calls=[{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}])


@pytest.mark.parametrize("template", ["trl/llama3_1", "trl/qwen2_5", "trl/qwen3", "trl/glm4moe", "trl/gptoss"])
def test_results_of_tools_are_json_or_text(template):
    """Objects are written as JSON, by the template or before it, and never as Python's text."""
    for content in ({"sky": "grey"}, [{"type": "text", "text": "Cloudy."}], None, []):
        messages = [ASKED, calls({"city": "Lisbon"}), {**RESULT, "content": content}, REPLY]
        text = tokenizer_of(template).decode(rows_of("sft", template, Chat(messages, [WEATHER]))[0].ids)
        assert ('"sky": "grey"' if isinstance(content, dict) else "Cloudy." if content else "") in text
        assert not any(part in text for part in ("'sky'", "'type'", "[]", "None"))


def test_the_kl_term_of_kto_pairs_each_prompt_with_another_completion(tmp_path, monkeypatch):
    """TRL #1911: in batches of odd size, and in a last batch of one row, a row had its own completion."""
    from ebft.preferences.trainers import KTOTrainer
    from tests.preferences.runs import pairs, trained, write_inputs

    write_inputs(tmp_path, [{**row, "completion": f"reply {number}"} for number, row in enumerate(pairs(7))])
    seen, step = [], KTOTrainer.training_step

    def spied(self, model, inputs, *args, **kwargs):
        for name in ("", "KL_"):
            masked = zip(inputs[f"{name}input_ids"], inputs[f"{name}completion_mask"], strict=True)
            seen.append([ids[mask.bool()].tolist() for ids, mask in masked])
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(KTOTrainer, "training_step", spied)
    trained("kto", tmp_path, micro_batch_size=3, max_steps=None, num_epochs=1)
    own, others = seen[::2], seen[1::2]
    assert sum(map(len, own)) >= 6
    assert all(a != b for batch, other in zip(own, others, strict=True) for a, b in zip(batch, other, strict=True))


def test_thinking_of_earlier_turns_is_counted(write_jsonl, capsys):
    asked, thinks = user("w7 Zq"), assistant("<think>\nt9 Zq\n</think>\n\nw8 Zq")
    talk = [asked, thinks, user("u2 Zq"), assistant("<think>t3 Zq</think>e")]
    path = write_jsonl([{"messages": talk}] * 3)
    for type, counts, count in (
        ("chat_template", {UNTHINKING: 3}, 3),
        ("ebft_strided_chat.transform_all_turns", {LEFT_OUT: 3}, 6),
    ):
        rows = load_token_rows(config_of(type, path=path, sequence_len=4096), tokenizer_of("trl/qwen3"))
        assert rows.reports[0].counts == counts and len(rows.train) == count
    assert f"produced 3 rows (3 {UNTHINKING})" in capsys.readouterr().err
