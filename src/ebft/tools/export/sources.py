"""What `ebft merge-lora`, `ebft inference` and `ebft quantize` find in a config or a folder."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ebft.data.locate import lasting_name
from ebft.errors import ConfigError, ModelError
from ebft.models.load import find_base_model, weights_dtype
from ebft.run.checkpoints import checkpoint_hint
from ebft.tools.export.adapter import CONFIG, read_adapter_config
from ebft.tools.export.merge import MergeSource

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


def adapter_of_run(config: RunConfig, adapter: str | None = None, base: str | None = None) -> MergeSource:
    """The adapter in the `output_dir` of a config (or in the folder `adapter`) and its base model."""
    if config.adapter is None and adapter is None:
        raise ConfigError(
            f"The config has no adapter, so {config.output_dir} contains a full model, which needs no merging."
        )
    folder = Path(adapter or config.output_dir).expanduser()
    if not (folder / CONFIG).is_file():
        hint = checkpoint_hint(folder, "ebft merge-lora CONFIG --lora-model-dir {}") or "Train the config first."
        raise ModelError(f"{folder} does not contain an adapter (no {CONFIG}). {hint}")
    bits = 4 if config.load_in_4bit else 8 if config.load_in_8bit else None
    return MergeSource(
        folder,
        lasting_name(base) if base else find_base_model(config),
        config.revision_of_model if base is None else None,
        config.trust_remote_code,
        tokenizer=folder,
        bits=bits,
        dtype=weights_dtype(config),
    )


def adapter_in_folder(folder: Path, base: str | None = None) -> MergeSource:
    """The adapter in a folder and the base model that its configuration names.

    Raises ModelError if it was trained on quantised weights: only the config has the settings of the quantisation.
    """
    config = read_adapter_config(folder)
    if _was_quantised(folder):
        raise ModelError(
            f"The adapter in {folder} was trained on quantised weights (adapter: qlora). Give the config of the run "
            "instead of the folder, since the settings of the quantisation are in the config."
        )
    base = base or config.base_model_name_or_path
    if not base:
        raise ModelError(f"{folder / CONFIG} does not name the base model. Give it with --base-model.")
    return MergeSource(folder, lasting_name(base), config.revision, tokenizer=folder)


def _was_quantised(folder: Path) -> bool:
    """Whether a run of `ebft train` with `adapter: qlora` saved this folder, by its card or its checkpoints."""
    for record in (folder / "ebft_run.json", *folder.glob("checkpoint-*/ebft_run.json")):
        try:
            if json.loads(record.read_text(encoding="utf-8")).get("adapter") == "qlora":
                return True
        except (OSError, ValueError, AttributeError):
            continue
    card = folder / "README.md"
    return card.is_file() and "QLoRA adapter" in card.read_text(encoding="utf-8", errors="replace")


def peak_bytes() -> int:
    """The largest resident memory of this process so far, in bytes; it includes pages of files that are mapped."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def as_mib(size: int) -> str:
    """A number of bytes in MiB, as text."""
    return f"{size / 2**20:,.1f} MiB"
