"""The number of adapters that a server keeps loaded, and their maximum rank."""

import json
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM supports for --max-lora-rank


def max_lora_rank(config: RunConfig) -> int | None:
    """Return the smallest supported `--max-lora-rank` for the adapter of `config`, or None without an adapter.

    Raises ConfigError if vLLM cannot serve the adapter.
    """
    if config.adapter is None:
        return None
    if config.lora_model_dir is None:
        key, rank, trained_in_full = "lora_r", config.lora_r, config.lora_modules_to_save
    else:
        key = "lora_model_dir"
        rank, trained_in_full = _saved_adapter(config.lora_model_dir)
    if trained_in_full:
        raise ConfigError(
            f"lora_modules_to_save: vLLM does not support adapters with fully trained modules "
            f"({', '.join(trained_in_full)}). Remove them, or set trl.use_vllm: false."
        )
    if rank > RANKS[-1]:
        raise ConfigError(
            f"{key}: the adapter's rank {rank} exceeds the maximum of {RANKS[-1]} supported by vLLM. Reduce lora_r, or "
            "set trl.use_vllm: false."
        )
    return next(limit for limit in RANKS if limit >= rank)


def adapter_slots(config: RunConfig) -> int:
    """Return the maximum number of adapter versions in use at the same time.

    Each prefetched batch may use a different version, in addition to that of the current batch and the one being
    loaded.
    """
    return config.trl.prefetch_depth + 2


def _saved_adapter(folder: str) -> tuple[int, list[str] | None]:
    """Return the largest rank of a saved adapter and its fully trained modules."""
    path = Path(folder).expanduser() / "adapter_config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        ranks = [saved["r"], *(saved.get("rank_pattern") or {}).values()]
        return max(ranks), saved.get("modules_to_save")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"lora_model_dir: cannot read a LoRA rank from {path} ({error!r}). Set it to the folder of a saved adapter."
        ) from None
