"""The SFT trainer on a stream: each checkpoint contains the position in the stream, from which training continues."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from ebft.data.batches import JoiningCollator
from ebft.data.stream import SKIPPED, Position
from ebft.errors import ConfigError, doing
from ebft.sft.packed import count_documents, why_not_joined
from ebft.sft.trainer import SFTTrainer

_SAVED_AS = "Stream"  # among the `stateful_callbacks` of trainer_state.json


class StreamTrainer(SFTTrainer):
    """SFT on the rows of a `StreamRows`. `order`: the settings that positions depend on, by config key.

    `packs`: whether the documents of a row do not see each other.

    Every process reads the whole stream and trains on its part of each batch, so that the rows of a step do not depend
    on the number of processes.
    """

    position: Position  # after the last row that this process has trained on

    def __init__(self, order: dict[str, Any], packs: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.position = Position()
        self.add_callback(_KeepPosition(self, order))
        if packs:
            self._unpack_if(why_not_joined(self.model))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.position = inputs.pop("position")
        self.budget.add(documents=inputs.pop("pieces") - count_documents(inputs))  # which SFTTrainer adds
        return super().training_step(model, inputs, num_items_in_batch)

    @property
    def rows_per_step(self) -> int:
        """Rows of all processes in an optimizer step."""
        return self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size


class _KeepPosition(TrainerCallback):
    """Writes the position of each completed step to the trainer's state, and continues from it after resuming."""

    def __init__(self, trainer: StreamTrainer, order: dict[str, Any]) -> None:
        self._trainer, self._order = trainer, order
        self._first = self._first_step = 0  # row and step that this run started at

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(_SAVED_AS)
        if state.global_step == 0:
            return
        with doing("reading the position in the stream in the checkpoint (streaming)"):
            _check_order(saved["order"], self._order)
        self._first, self._first_step = saved["rows"], state.global_step
        skipped = state.global_step * self._trainer.rows_per_step
        self._trainer.train_dataset.continue_from(Position(**saved["position"]), saved["rows"], skipped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = self._first + (state.global_step - self._first_step) * self._trainer.rows_per_step
        position = self._trainer.position.as_json()
        state.stateful_callbacks[_SAVED_AS] = {"rows": rows, "position": position, "order": self._order}


def _check_order(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError for settings with which a position would be another one."""
    changed = [key for key in now if saved.get(key) != now[key]]
    if changed:
        text = "; ".join(f"{key}: {now[key]} instead of {saved.get(key)}" for key in changed)
        raise ConfigError(
            f"The stream differs from the one of the checkpoint: {text}. A run cannot continue in another stream: set "
            "these keys to their former values, or start a new run in another output_dir."
        )


class StreamCollator(JoiningCollator):
    """`JoiningCollator` that also collates rows of a stream.

    Their batch also has `position`, after its last row, and `pieces`, the number of documents. Rows of steps before a
    checkpoint make an empty batch.
    """

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if rows[0] == SKIPPED:
            return {}
        batch: dict[str, Any] = super().__call__(rows)
        if "position" in rows[0]:
            batch |= {"position": rows[-1]["position"], "pieces": sum(row["pieces"] for row in rows)}
        return batch
