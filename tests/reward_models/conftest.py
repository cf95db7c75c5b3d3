"""A tiny chat model, and configs that train on pairs of replies and on rows of steps, of different lengths."""

import json
import warnings
from pathlib import Path

import pytest

from ebft import load_config
from ebft.run.config.schema import RunConfig
from tests.golden.runs import comparisons, steps
from tests.structured.conftest import save_chat_model

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
PAIRS, STEPS = comparisons()[:12], steps()[:12]
KINDS = {"outcome": ({"reward_model": True}, PAIRS, "bradley_terry.chat_template"),
         "process": ({"process_reward_model": True}, STEPS, "stepwise_supervised")}  # fmt: skip


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat-model"), **SIZES)


@pytest.fixture
def make(model_dir, tmp_path):
    """`make(kind, **keys)`: the config of a reward model that trains on all rows but two, in float32."""
    return lambda kind, **keys: config_of(kind, model_dir, tmp_path, **keys)


def config_of(kind: str, model: Path, folder: Path, **keys) -> RunConfig:
    flag, rows, transform = KINDS[kind]
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {"base_model": str(model), **flag,
              "datasets": [{"path": str(folder / f"{kind}.jsonl"), "type": transform}], "val_set_size": 3,
              "sequence_len": 200, "micro_batch_size": 2, "eval_batch_size": 2, "max_steps": 2, "eval_steps": 2,
              "logging_steps": 1, "save_strategy": "no", "torch_dtype": "float32", "learning_rate": 1e-2,
              "output_dir": str(folder / "out"), **keys}  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
    with warnings.catch_warnings(action="ignore"):
        return load_config(folder / "run.yaml")
