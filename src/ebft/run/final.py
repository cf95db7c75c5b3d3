"""The final model in the output folder, which is marked as complete when all of its files are there."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import Trainer

from ebft.config.schema import RunConfig
from ebft.durable import STAGING, publish_files, write_text
from ebft.errors import SaveError
from ebft.over_transformers import save_final_weights
from ebft.run.card import CARD, write_model_card
from ebft.run.integrity import STATE, read_json
from ebft.run.same_run import write_run_keys

MARK = "ebft_final.json"  # written last: the step of the model, and the sizes of its files


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
    """Remove the mark of the final model of an earlier run, when a new one starts."""
    (output_dir / MARK).unlink(missing_ok=True)


def save_final(config: RunConfig, trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Save model, tokenizer, trainer state and model card in the output folder, then mark them as complete.

    After an interruption, the folder has no mark. Raises SaveError if the files cannot be written.
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
            write_run_keys(config, staged)
            write_model_card(config, metrics, staged)
            mark = {"step": trainer.state.global_step, "files": _sizes(staged)}
            forget_final(output_dir)
            publish_files(staged, output_dir)
            write_text(output_dir / MARK, json.dumps(mark, indent=2) + "\n")
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError if the disk is full
        if saves:
            shutil.rmtree(staged, ignore_errors=True)
        raise SaveError.of(output_dir, error) from error


def _sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of every file but the model card, which TRL replaces at every checkpoint."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != CARD]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
