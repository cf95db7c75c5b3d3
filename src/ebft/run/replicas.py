"""Processes of one run that were started with different configs or rows: their copies of the model would diverge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError

# Keys that may differ between machines: places of files, resources, and what only the main process reads.
_OF_MACHINES = frozenset(
    (
        *("output_dir", "base_model", "base_model_config", "tokenizer_config", "lora_model_dir"),
        *("resume_from_checkpoint", "auto_resume_from_checkpoints", "dataset_prepared_path", "skip_prepare_dataset"),
        *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "local_rank", "debug", "strict"),
        *("use_tensorboard", "use_wandb", "use_trackio", "trackio_project_name", "wandb_project", "wandb_entity"),
        *("wandb_name", "wandb_run_id", "wandb_watch", "wandb_log_model", "wandb_mode", "report_to"),
        *("hub_model_id", "hub_strategy", "hub_private_repo", "trl.vllm_server_host", "trl.vllm_server_port"),
    )
)
_OF_ENTRIES = ("path", "data_files")  # the same, of each of `datasets` and `test_datasets`
_ROWS = 8  # compared rows


def check_same_everywhere(config: RunConfig, precision: str, rows: Any, held_out: Any, checkpoint: str | None) -> None:
    """Raise ConfigError, in all processes, if one of them has another config, other rows, or resumes elsewhere.

    `precision` is the one in effect, `held_out` the evaluation rows or None. All processes must call this together.
    """
    settings = config.model_dump(mode="json")
    for entry in (*settings["datasets"], *settings["test_datasets"]):
        for key in _OF_ENTRIES:
            del entry[key]
    found = {key: value for key, value in _flat(settings) if key not in _OF_MACHINES} | {
        "the precision in effect": precision,
        "the training rows": _summary(rows),
        "the held-out rows": _summary(held_out),
        "the checkpoint to resume from": None if checkpoint is None else Path(checkpoint).name,
    }
    check_equal(gather_object([{key: _digest(value) for key, value in found.items()}]))


def check_equal(digests: list[dict[str, str]]) -> None:
    """Raise ConfigError if the digests of a process, which are in the order of ranks, are not those of the first."""
    first = digests[0]
    for rank, other in enumerate(digests):
        names = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        if names:
            raise ConfigError(
                f"The processes of this run would train different models: rank {rank} differs from rank 0 in "
                f"{', '.join(sorted(names))}. Start all processes, on every machine, with the same config, overrides "
                "and files."
            )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of keys and of the keys of sections, such as `ebft.stride`; those of the server are for one process."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "vllm":
            yield from _flat(value, f"{prefix}{key}.")
        elif key != "vllm":
            yield prefix + key, value


def _summary(rows: Any) -> list[Any]:
    """The number of the rows, and the first ones."""
    if not isinstance(rows, Sized):
        return []
    return [len(rows), *(rows[place] for place in range(min(_ROWS, len(rows))))]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
