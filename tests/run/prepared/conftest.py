"""One dataset for every method, with rows that are dropped, and a config for it."""

import json
import warnings

import pytest

from ebft.run.config.schema import RunConfig

METHODS = {
    "sft": {"rl": None}, "strided": {}, "packed": {"sample_packing": True},
    "text": {"type": "ebft_pretrain.transform"}, "structured": {"mode": "structured"},
    "grpo": {"rl": "grpo", "trl": {"num_generations": 2, "reward_funcs": ["feature_matching"]}},
}  # fmt: skip

RUN = {"sequence_len": 64, "val_set_size": 2, "micro_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3}
RUN |= {"save_strategy": "no"}


@pytest.fixture
def rows_file(tmp_path):
    rows = [{"input": f"question {i} is", "output": f" the answer to it is {i}, and no other"} for i in range(10)]
    rows += [{"input": "without", "output": ""}, {"input": "long", "output": " word" * 90}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "text": row["input"] + row["output"]}) + "\n" for row in rows))
    return path


@pytest.fixture
def make(rows_file, tiny_llama_dir, tmp_path):
    """`make(method, **keys)`: a config; `type` and `mode` are those of the dataset and of `ebft:`."""

    def config(method="strided", **keys):
        keys = {**METHODS[method], **keys}
        ebft = {"context_length": 4, "stride": 4, "generate_max_len": 2, "n_samples_per_prompt": 2}
        trl = {"num_generations": 2, "max_completion_length": 4}
        values = {
            "base_model": str(tiny_llama_dir), "special_tokens": {"pad_token": "<|end|>"}, "rl": "ebft",
            "ebft": {"mode": keys.pop("mode", "strided"), **ebft, **keys.pop("ebft", {})},
            "trl": {**trl, **keys.pop("trl", {})},
            "datasets": [{"path": str(rows_file), "type": keys.pop("type", "ebft_strided_structured.transform")}],
            "output_dir": str(tmp_path / "out"), **RUN, **keys,
        }  # fmt: skip
        with warnings.catch_warnings(action="ignore"):
            return RunConfig.from_dict({key: value for key, value in values.items() if value is not None})

    return config


@pytest.fixture
def tokenizer(make):
    from ebft.models.pretrained import load_tokenizer

    return load_tokenizer(make())
