"""What happens to the files of an earlier run in the output folder when training really begins."""

import shutil
import warnings
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from ebft.config.schema import RunConfig
from ebft.dashboard.files import PREVIOUS
from ebft.errors import SaveError, cause, save_remedy
from ebft.monitor.continuing import set_aside
from ebft.monitor.run_files import RunFiles
from ebft.run.checkpoints import checkpoint_folders, set_later_aside
from ebft.run.final import forget_final
from ebft.run.own_files import MARK, final_files, write_mark


class Beginning(TrainerCallback):
    """Sets the files of an earlier run aside once training begins: a run that fails before that leaves them unchanged.

    It must be the first callback of `trainer`, on all processes, so that no file of the new run is moved. `files` are
    those of the main process. Raises SaveError if the output folder cannot be written.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, files: RunFiles | None) -> None:
        self._config, self._trainer, self._files = config, trainer, files

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        previous = self._leave_earlier_run(state.global_step) if args.should_save else None
        if self._files is not None:
            self._files.begin(state, previous)
        self._trainer.accelerator.wait_for_everyone()

    def _leave_earlier_run(self, step: int) -> Path | None:
        """The folder that the files of an earlier run were moved to, if this run is a new one."""
        output_dir = Path(self._config.output_dir)
        try:
            if step == 0:
                return set_earlier_aside(self._config)
            if self._config.resume_from_checkpoint is not None:
                forget_final(output_dir)
            set_later_aside(self._config)
        except OSError as error:
            raise SaveError(
                f"The files of an earlier run in {output_dir} cannot be moved to {PREVIOUS}: {cause(error)}. "
                f"{save_remedy(output_dir / PREVIOUS, error)}, or set another output_dir."
            ) from error
        return None


def set_earlier_aside(config: RunConfig) -> Path | None:
    """Move the checkpoints and the final model of an earlier run to a new folder in `previous`, with one warning.

    Otherwise, auto_resume_from_checkpoints would continue from them, and the model would be taken for that of this run.
    Returns the folder, or None if there are none.
    """
    output_dir = Path(config.output_dir)
    checkpoints, final = checkpoint_folders(output_dir), final_files(output_dir)
    target = set_aside(output_dir, [*checkpoints, *final])
    if target is not None and final:
        shutil.copy2(output_dir / MARK, target)
    write_mark(output_dir, None, {}, [])
    if target is not None:
        what = [*(folder.name for folder in checkpoints), *(["the final model"] if final else [])]
        warnings.warn(f"The files of an earlier run were moved to {target}: {', '.join(what)}", stacklevel=2)
    return target
