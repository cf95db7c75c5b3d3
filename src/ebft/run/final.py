"""The final model in the output folder, which is marked as complete when all of its files are there."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.dashboard.files import CARD
from ebft.durable import STAGING, STATE, checksum, publish_files
from ebft.errors import SaveError
from ebft.over_trainer import OverTrainer
from ebft.over_transformers import save_final_weights
from ebft.run.card import write_model_card
from ebft.run.own_files import cards, listed, owns_card, unlisted, write_mark


def forget_final(output_dir: Path) -> None:
    """Mark the final model of an earlier run as not complete; its files are still listed."""
    write_mark(output_dir, None, listed(output_dir), cards(output_dir))


def save_final(config: RunConfig, trainer: OverTrainer, metrics: Mapping[str, float]) -> None:
    """Save model, tokenizer, trainer state and model card in the output folder, then mark them as complete.

    Files of the final model of an earlier run are replaced or deleted. After an interruption, the model is not marked
    as complete. Raises SaveError if the files cannot be written.
    """
    output_dir = Path(config.output_dir)
    staged = output_dir / STAGING / "final"
    saves = trainer.args.should_save
    with trainer.saving(output_dir, staged):
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
            _publish(staged, output_dir, trainer.state.global_step)
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)


def _publish(staged: Path, output_dir: Path, step: int) -> None:
    """Move the complete model from `staged` to the output folder, where it replaces files of a final model only.

    While the files are moved, both the old and the new ones are listed, so that a run that was killed knows them.
    """
    files, before = _sizes(staged), listed(output_dir)
    others = unlisted(output_dir, files)
    if others:
        raise SaveError(
            f"{output_dir} contains {', '.join(others)}, which the run has not written and does not replace. The model "
            f"is complete in {staged}, up to the next run in this folder: move it to another one."
        )
    if not owns_card(output_dir):
        (staged / CARD).unlink()
    card = [checksum(staged / CARD)] if (staged / CARD).is_file() else []
    write_mark(output_dir, None, before | files, [*cards(output_dir), *card])
    publish_files(staged, output_dir, [path for name in before if (path := output_dir / name).is_file()])
    write_mark(output_dir, step, files, card)


def _sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of every file but the model card, which may be edited."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != CARD]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
