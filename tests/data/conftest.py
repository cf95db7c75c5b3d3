"""A strided run config over given sources, rows of transforms, and the tiny tokenizer, also with a chat template."""

import copy
import json
import textwrap
import uuid

import pytest
from datasets import Dataset

from ebft.config.keys.data import DatasetEntry
from ebft.data.apply import Source, tokenise
from ebft.run.config.schema import RunConfig
from tests.structured.conftest import CHATML


def user(content, **keys):
    return {"role": "user", "content": content, **keys}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def entry(path, **keys):
    return DatasetEntry.model_validate({"path": str(path), "type": "completion", **keys})


def config_of(type, entry=None, path="x", **keys):
    """The config of an SFT run, or with these keys, on one dataset."""
    datasets = [{"path": str(path), "type": type, **(entry or {})}]
    return RunConfig.from_dict({"base_model": "x", "datasets": datasets, **keys})


def tokenised(tokenizer, type, *rows, entry=None, counts=None, **keys):
    """The rows of tokens that a transform makes of these rows."""
    config = config_of(type, entry, **keys)
    return tokenise(Source(config.datasets[0], Dataset.from_list(list(rows))), config, tokenizer, counts)


@pytest.fixture(scope="session")
def tokenizer(tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


@pytest.fixture
def chatml(tokenizer):
    """The tokenizer with a ChatML template that puts no word of its own between the turns."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def make_config():
    """`make_config(path, type=..., entry={...}, **keys)`: a strided config with one dataset entry."""

    def make(path, type="ebft_pretrain.transform", entry=None, **keys):
        datasets = [{"path": str(path), "type": type, **(entry or {})}]
        values = {"base_model": "unused", "rl": "ebft", "ebft": {"mode": "strided"}, "sequence_len": 64}
        values |= {"datasets": datasets, **keys}
        return RunConfig.from_dict({key: value for key, value in values.items() if value is not None})

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def simple(result, map_kwargs='{"remove_columns": "__all__"}'):
    """The module of a transform of the user's own whose function returns this."""
    return f"""
    def transform(cfg, **kwargs):
        def transform_fn(example, tokenizer=None):
            return {result}
        return transform_fn, {map_kwargs}
    """


@pytest.fixture
def own(tmp_path, monkeypatch):
    """`own(module)`: the `type` of a transform of the user's own, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(module):
        name = f"own_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(module))
        return f"{name}.transform"

    return write
