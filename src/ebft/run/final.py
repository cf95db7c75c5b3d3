"""The final model in the output folder, which is marked as complete when all of its files are there."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ebft.config.schema import RunConfig
from ebft.durable import STAGING, publish_files, write_text
from ebft.errors import SaveError
from ebft.over_trainer import OverTrainer
from ebft.over_transformers import save_final_weights
from ebft.run.card import CARD, write_model_card
from ebft.run.integrity import STATE, read_json

MARK = "ebft_final.json"  # written last: the step of the model (null if not complete), and the sizes of its files
# Files that are read from a folder if they exist, also those of a final model whose mark is missing.
_WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model*.safetensors",
    "adapter_config.json",
)


def final_step(output_dir: Path) -> int | None:
    """The step of the final model in `output_dir`; None if there is none or if files are missing or truncated."""
    try:
        mark = read_json(output_dir / MARK)
        sizes: dict[str, Any] = mark["files"]
        complete = all((output_dir / name).stat().st_size == size for name, size in sizes.items())
        return mark["step"] if complete else None
    except (OSError, ValueError, KeyError):
        return None


def forget_final(output_dir: Path) -> None:
    """Mark the final model of an earlier run as not complete, when a new one starts; its files are still listed."""
    names = _listed(output_dir)
    if names:
        write_text(output_dir / MARK, json.dumps({"step": None, "files": names}, indent=2) + "\n")
    else:
        (output_dir / MARK).unlink(missing_ok=True)


def save_final(config: RunConfig, trainer: OverTrainer, metrics: Mapping[str, float]) -> None:
    """Save model, tokenizer, trainer state and model card in the output folder, then mark them as complete.

    Files of the final model of an earlier run are replaced or deleted. After an interruption, the model is not marked
    as complete. Raises SaveError if the files cannot be written.
    """
    output_dir = Path(config.output_dir)
    staged = output_dir / STAGING / "final"
    saves = trainer.args.should_save
    try:
        if saves:
            shutil.rmtree(staged, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        save_final_weights(trainer, str(staged))
        trainer.accelerator.wait_for_everyone()
        if saves:
            trainer.state.save_to_json(str(staged / STATE))
            for write in trainer.into_model:
                write(staged)
            write_model_card(config, metrics, staged)
            mark = {"step": trainer.state.global_step, "files": _sizes(staged)}
            forget_final(output_dir)
            publish_files(staged, output_dir, _files_before(output_dir))
            write_text(output_dir / MARK, json.dumps(mark, indent=2) + "\n")
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError if the disk is full
        if saves:
            shutil.rmtree(staged, ignore_errors=True)
        raise SaveError.of(output_dir, error) from error


def _listed(output_dir: Path) -> dict[str, int]:
    """The files, with their sizes, in the mark of the final model, also of one that is not complete."""
    try:
        return dict(read_json(output_dir / MARK)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def final_files(output_dir: Path) -> list[Path]:
    """All files of the final model of an earlier run in `output_dir`, its model card and its mark as the last ones."""
    mark = output_dir / MARK
    return [*_files_before(output_dir), output_dir / CARD, mark] if mark.is_file() else _files_before(output_dir)


def _files_before(output_dir: Path) -> list[Path]:
    """The files of the final model of an earlier run in `output_dir`, apart from its model card and its mark."""
    names = [Path(name) for name in _listed(output_dir)]
    inside = [output_dir / name for name in names if not name.is_absolute() and ".." not in name.parts]
    found = {*inside, *(path for pattern in _WEIGHTS for path in output_dir.glob(pattern))}
    return sorted(path for path in found if path.is_file())


def _sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of every file but the model card, which TRL replaces at every checkpoint."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != CARD]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
