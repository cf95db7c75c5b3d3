"""Faults that users of other projects reported, and that the comparison of whole rows does not contain.

Rows are read from JSON lines, as training reads them. The docstrings name the project and what was reported.
"""

import json
import warnings

import pytest

from ebft.data.load import load_token_rows
from ebft.data.preferences import load_preference_rows
from ebft.data.prompts import load_prompt_rows
from ebft.data.reward_rows import load_comparisons
from ebft.errors import DataError
from ebft.run.config.schema import RunConfig
from tests.data.conftest import assistant, user
from tests.data.rendering.expected import Chat, tokenizer_of
from tests.data.rendering.rows import SETTINGS, conversation, raw_row

ASKED, REPLY = user("How many?"), assistant("Seven.")
RESULT = {"role": "tool", "content": "Cloudy.", "name": "get_weather"}
METHODS = ("sft", "strided", "multiturn", "dpo", "kto", "reward_model")


WEATHER = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}
WEATHER = {"type": "function", "function": WEATHER}


def calls(arguments):
    return assistant("", tool_calls=[{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}])


@pytest.fixture
def load(tmp_path_factory):
    """`load(method, template, chats)`: the text of each row that training reads from a file."""

    def loaded(method, template, chats):
        path = tmp_path_factory.mktemp("data") / "rows.jsonl"
        path.write_text("\n".join(json.dumps(raw_row(method, chat)) for chat in chats) + "\n", encoding="utf-8")
        settings, type = SETTINGS[method]
        values = {"base_model": "unused", "sequence_len": 2000, "shuffle_merged_datasets": False, **settings}
        with warnings.catch_warnings(action="ignore"):
            config = RunConfig.from_dict({**values, "datasets": [{"path": str(path), "type": type}]})
            kind, tokenizer = config.required_rows.kind, tokenizer_of(template)
            if kind == "prompts":
                rows = list(load_prompt_rows(config, tokenizer)[0])
            else:
                reads = {"tokens": load_token_rows, "comparisons": load_comparisons}
                rows = list(reads.get(kind, load_preference_rows)(config, tokenizer).train)
        return [tokenizer.decode(list(tokens_of(tokenizer, row))) for row in rows]

    return loaded


def tokens_of(tokenizer, row):
    """The tokens of a row of any method, prompts and references rendered."""
    if "prompt" in row:
        for turn in conversation(tokenizer, row).turns:
            yield from (*turn.lead_ids, *turn.reference_ids)
    else:
        yield from (token for key, ids in row.items() if key.endswith("_ids") for token in ids)


@pytest.mark.first(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("template", ["ebft/chatml", "trl/qwen2_5_vl"])
def test_contents_that_are_not_text(load, method, template):
    """Templates print a number or a list as Python does, and omit parts that they do not know."""
    for content, message in (
        ([{"type": "text", "text": "See", "image": "x"}], "a part that is not text .* models are trained on text"),
        (5, "must be text or a list of parts with text, got int"),
    ):
        for messages in ([{**ASKED, "content": content}, REPLY], [ASKED, {**REPLY, "content": content}]):
            with pytest.raises(DataError, match=rf"row 0: .*content of message \d \((user|assistant)\).*{message}"):
                load(method, template, [Chat(messages)])


@pytest.mark.parametrize("template", ["trl/llama3_1", "trl/qwen2_5", "trl/qwen3", "trl/glm4moe", "trl/gptoss"])
def test_results_of_tools_are_json_or_text(load, template):
    """Objects are written as JSON, by the template or before it, and never as Python's text."""
    for content in ({"sky": "grey"}, [{"type": "text", "text": "Cloudy."}], None, []):
        messages = [ASKED, calls({"city": "Lisbon"}), {**RESULT, "content": content}, REPLY]
        (text,) = load("sft", template, [Chat(messages, [WEATHER])])
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
