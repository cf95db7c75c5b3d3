"""What happens to the files of an earlier run in the output folder when training really begins."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from ebft.config.schema import RunConfig
from ebft.errors import SaveError
from ebft.monitor.run_files import RunFiles
from ebft.run.checkpoints import set_later_aside
from ebft.run.final import forget_final


class Beginning(TrainerCallback):
    """Sets the files of an earlier run aside once training begins: a run that fails before that leaves them unchanged.

    It must be the first callback of `trainer`, on all processes, so that no file of the new run is moved. `files` are
    those of the main process. Raises SaveError if the output folder cannot be written.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, files: RunFiles | None) -> None:
        self._config, self._trainer, self._files = config, trainer, files

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            self._leave_earlier_run(state.global_step)
        if self._files is not None:
            self._files.begin(state)
        self._trainer.accelerator.wait_for_everyone()

    def _leave_earlier_run(self, step: int) -> None:
        output_dir = Path(self._config.output_dir)
        try:
            if step == 0 or self._config.resume_from_checkpoint is not None:
                forget_final(output_dir)
            if step > 0:
                set_later_aside(self._config)
        except OSError as error:
            raise SaveError.of(output_dir, error) from error
