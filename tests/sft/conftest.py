"""Runs on a stream of the standard library's text, with a tiny random model."""

import json
import textwrap
from pathlib import Path

import pytest

from ebft.run.config.schema import RunConfig


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> list[Path]:
    """Two files of JSON lines with texts of 40 to 360 characters."""
    source = Path(textwrap.__file__).read_text()
    lengths = [40 + 37 * number % 320 for number in range(60)]
    texts = [source[sum(lengths[:number]) :][:length] for number, length in enumerate(lengths)]
    folder = tmp_path_factory.mktemp("corpus")
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for path, part in zip(paths, (texts[:45], texts[45:])):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return paths


@pytest.fixture(scope="session")
def make(tiny_llama_dir, corpus, tmp_path_factory):
    """`make(**keys)`: a config for six steps over that corpus, with a folder of its own."""

    def make_config(**keys):
        values = {"base_model": tiny_llama_dir, "pretraining_dataset": [{"path": corpus[0].parent}]}
        values |= {"streaming_multipack_buffer_size": 3, "special_tokens": {"pad_token": "<|end|>"}, "sequence_len": 32}
        values |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 1e-3}
        values |= {"logging_steps": 1, "output_dir": tmp_path_factory.mktemp("run") / "out"}
        return RunConfig.from_dict({**values, **keys})

    return make_config
