"""Small runs of the preference methods: rows, models and configs that the tests share."""

import json
import warnings
from pathlib import Path
from typing import Any

from ebft import RunConfig, train
from tests.golden.runs import LORA, sentence
from tests.structured.conftest import save_chat_model

PAIRED = ("dpo", "ipo", "orpo", "simpo")
METHODS = (*PAIRED, "kto")
WITH_REFERENCE = ("dpo", "ipo", "kto")
TRAINERS = ("dpo", "orpo", "simpo", "kto")  # a method for each class of trainers; that of DPO is also that of IPO


def pairs(count: int = 12) -> list[dict[str, Any]]:
    """Rows of `chatml.intel` for every method: with a pair, and with one completion and its label."""
    return [{"system": "", "question": sentence(number, 2 + number % 3), "chosen": sentence(number + 3, 2 + number % 4),
             "rejected": sentence(number + 7, 1 + number % 3), "completion": sentence(number + 3, 2 + number % 4),
             "label": number % 3 > 0} for number in range(count)]  # fmt: skip


def write_inputs(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write a tiny model with its tokenizer, and rows, into `folder`."""
    save_chat_model(folder / "model")
    lines = [json.dumps(row) for row in (pairs() if rows is None else rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def config_of(method: str, folder: Path, adapter: bool = True, **changes: Any) -> RunConfig:
    """A run of three steps on the inputs in `folder`."""
    return RunConfig.from_dict({"base_model": str(folder / "model"), "rl": method,
                                "datasets": [{"path": str(folder / "rows.jsonl"), "type": "chatml.intel"}],
                                "sequence_len": 256, "micro_batch_size": 2, "max_steps": 3, "logging_steps": 1,
                                "learning_rate": 2.0e-3, "torch_dtype": "float32", "save_strategy": "no", "seed": 7,
                                "output_dir": str(folder / "out"), **(LORA if adapter else {}), **changes})  # fmt: skip


def trained(*args: Any, **changes: Any) -> Any:
    """The result of a run of `config_of`, without warnings."""
    with warnings.catch_warnings(action="ignore"):
        return train(config_of(*args, **changes))
