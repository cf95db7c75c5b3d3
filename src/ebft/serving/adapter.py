"""How many adapters a server holds, and of what rank."""

import json
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM takes for --max-lora-rank


def max_lora_rank(config: RunConfig) -> int | None:
    """The smallest rank limit of vLLM that holds the adapter of `config`; None without an adapter."""
    if config.adapter is None:
        return None
    if config.lora_model_dir is None:
        key, rank, trained_in_full = "lora_r", config.lora_r, config.lora_modules_to_save
    else:
        key = "lora_model_dir"
        rank, trained_in_full = _saved_adapter(config.lora_model_dir)
    if trained_in_full:
        raise ConfigError(
            f"lora_modules_to_save: vLLM serves no modules trained in full beside an adapter "
            f"({', '.join(trained_in_full)}). Remove them, or set trl.use_vllm: false."
        )
    if rank > RANKS[-1]:
        raise ConfigError(
            f"{key}: an adapter of rank {rank} is beyond the {RANKS[-1]} that vLLM serves. Lower lora_r, or set "
            "trl.use_vllm: false."
        )
    return next(limit for limit in RANKS if limit >= rank)


def adapter_slots(config: RunConfig) -> int:
    """How many versions of the adapter are in use at once.

    Each batch generated ahead may still run on its own version, beside the one of the batch now trained on and the one
    that is being loaded.
    """
    return config.trl.prefetch_depth + 2


def _saved_adapter(folder: str) -> tuple[int, list[str] | None]:
    """The largest rank in a saved adapter, and its modules trained in full."""
    path = Path(folder).expanduser() / "adapter_config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        ranks = [saved["r"], *(saved.get("rank_pattern") or {}).values()]
        return max(ranks), saved.get("modules_to_save")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"lora_model_dir: no LoRA rank can be read from {path} ({error!r}). Give the folder of a saved adapter."
        ) from None
