"""Runs that are already complete: recognising them, and restoring their model without training."""

import warnings
from pathlib import Path

from transformers import TrainerState

from ebft.config.schema import RunConfig
from ebft.durable import STATE
from ebft.errors import ConfigError
from ebft.monitor import limit_reached, spent_at
from ebft.over_trainer import OverTrainer
from ebft.over_transformers import load_weights
from ebft.run.arguments import planned_steps
from ebft.run.checkpoints import Found, newest_checkpoint, step_of
from ebft.run.checks import Machine
from ebft.run.own_files import final_step
from ebft.run.stopping import stopped_early


def finished_at(config: RunConfig, found: Found, machine: Machine, rows: int) -> Path | None:
    """The folder with the weights of the complete run: at or past its last step or its budget. None if there is none.

    It is a checkpoint or, for a run whose last checkpoint was not kept, the output folder.
    """
    if found.newest is None:
        return None
    last_step = planned_steps(config, machine, rows)
    is_complete = (
        step_of(found.newest) >= last_step
        or limit_reached(config.budget, spent_at(found.newest)) is not None
        or stopped_early(config, found.newest) is not None
    )
    if is_complete:
        _check_newest(config, found.newest)
        return found.newest
    return None


def _check_newest(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if output_dir has the results of later steps, which the model of `folder` would replace."""
    output_dir, step = Path(config.output_dir), step_of(folder)
    newest = newest_checkpoint(output_dir)
    later = max(final_step(output_dir) or 0, 0 if newest is None else step_of(newest))
    if config.resume_from_checkpoint is not None and later > step:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is at step {step}, at or past the end of this run, so nothing would be "
            f"trained, and output_dir: {output_dir} has results up to step {later}, which are kept. Set another "
            "output_dir to save the model of the checkpoint there, or increase max_steps, num_epochs or budget to "
            "train on from it."
        )


def restore(config: RunConfig, trainer: OverTrainer, folder: Path) -> None:
    """Restore model and state of a finished run from its folder, and warn that nothing is trained."""
    step, limit = step_of(folder), limit_reached(config.budget, spent_at(folder))
    keys = "max_steps or num_epochs" if limit is None else f"budget.{limit}"
    if limit is None:
        keys = stopped_early(config, folder) or keys
    warnings.warn(
        f"Training is already complete: {folder} is at step {step}, at or past the end of this run. Increase {keys} to "
        "continue training.",
        stacklevel=2,
    )
    output_dir = Path(config.output_dir)
    # The state of the final model has the evaluation at the last step, before which checkpoints are saved.
    of_run = output_dir.resolve() in (folder.resolve(), folder.resolve().parent)
    is_saved = of_run and final_step(output_dir) == step
    trainer.state = TrainerState.load_from_json(str((output_dir if is_saved else folder) / STATE))
    load_weights(trainer, str(folder))
    trainer.finish_evaluation(str(folder))
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    if best is not None and Path(best).is_dir() and folder != output_dir:  # which has the best weights
        load_weights(trainer, best)
