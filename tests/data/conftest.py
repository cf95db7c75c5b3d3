"""A strided run config over given sources, and the tiny tokenizer itself, also with a chat template."""

import copy
import json

import pytest


@pytest.fixture(scope="session")
def tokenizer(tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


@pytest.fixture
def chatml(tokenizer):
    """The tokenizer with a ChatML template that puts no word of its own between the turns."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


@pytest.fixture
def make_config():
    """`make_config(path, type=..., entry={...}, **keys)`: a strided config with one dataset entry."""
    from ebft.config.schema import RunConfig

    def make(path, type="ebft_pretrain.transform", entry=None, **keys):
        values = {
            "base_model": "unused",
            "rl": "ebft",
            "ebft": {"mode": "strided"},
            "sequence_len": 64,
            "datasets": [{"path": str(path), "type": type, **(entry or {})}],
            **keys,
        }
        return RunConfig.from_dict({key: value for key, value in values.items() if value is not None})

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return path

    return write
