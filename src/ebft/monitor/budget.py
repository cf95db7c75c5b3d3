"""The compute budget of a run: totals that are comparable between methods, and a callback that stops at a limit.

`budget/documents` is the number of rows trained on, including repetitions; every document of a packed row counts, and
for full completions, prompts are counted. `budget/generated_tokens` is the number of sampled tokens. `budget/flops` are
those of `ebft.monitor.flops` in training steps, without evaluation. All are summed over ranks and continue after
resuming from a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ebft.monitor.flops import FlopMeter
from ebft.run.keys import BudgetSection

COUNTED = ("documents", "generated_tokens", "flops")
_SAVED_AS = "Budget"  # among the `stateful_callbacks` of trainer_state.json


class Budget:
    """Totals of a run; the amounts added on each rank are included at the end of every optimizer step."""

    def __init__(self) -> None:
        self.meter: FlopMeter = FlopMeter()
        self.restart({})

    def restart(self, spent: dict[str, float]) -> None:
        """Continue from totals of all ranks, as saved in a checkpoint; missing ones start at 0."""
        self.totals: dict[str, float] = dict.fromkeys(COUNTED, 0) | spent
        self._documents, self._generated_tokens, self.meter.flops = 0.0, 0, 0

    def add(self, documents: float = 0, generated_tokens: int = 0, flops: int = 0) -> None:
        """Add to the amounts of this rank; `flops` only for computation that the meter does not count.

        `documents` may be fractional if the samples of a prompt are shared between ranks.
        """
        self._documents += documents
        self._generated_tokens += generated_tokens
        self.meter.flops += flops

    def gather(self, accelerator: Any) -> None:
        """Add the amounts of all ranks since the last call to the totals."""
        added = torch.tensor([self._documents, self._generated_tokens, self.meter.flops], dtype=torch.float64)
        if accelerator.num_processes > 1:
            added = accelerator.reduce(added.to(accelerator.device), "sum")
        totals = {name: self.totals[name] + value for name, value in zip(COUNTED, added.tolist())}
        self.restart({name: round(value) for name, value in totals.items()})


class CountsBudget:
    """Mixin for a transformers Trainer: `self.budget` accumulates over training steps and is logged with the loss.

    FLOPs are not counted for compiled models.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget: Budget = Budget()
        self.add_callback(KeepBudget(self))

    def computing_models(self) -> list[nn.Module]:
        """Return the models whose FLOPs are counted."""
        return [self.model]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.budget.meter.watching([] if self.args.torch_compile else self.computing_models()):
            return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        with self.budget.meter.counting():
            return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs or "train_loss" in logs:  # the latter is logged once, at the end of training
            counted = [name for name in COUNTED if name != "flops" or not self.args.torch_compile]
            logs = {**logs, **{f"budget/{name}": self.budget.totals[name] for name in counted}}
        super().log(logs, start_time)


class KeepBudget(TrainerCallback):
    """Updates a trainer's budget after every step, saves it in the trainer state, and restores it when resuming."""

    def __init__(self, trainer: CountsBudget) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.budget.restart(state.stateful_callbacks.get(_SAVED_AS, {}))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.budget.gather(self.trainer.accelerator)
        state.stateful_callbacks[_SAVED_AS] = self.trainer.budget.totals


class StopAtBudget(TrainerCallback):
    """Stops training after the step that reaches a limit, which is logged, evaluated and saved like a last step."""

    def __init__(self, budget: Budget, limits: BudgetSection) -> None:
        self.budget, self.limits = budget, limits

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        name = limit_reached(self.limits, self.budget.totals)
        if name is None:
            return
        control.should_training_stop = control.should_log = True
        control.should_evaluate |= args.eval_strategy == "steps"
        control.should_save |= args.save_strategy == "steps"
        if state.is_world_process_zero:
            limit, spent = self.limits.model_dump()[name], self.budget.totals[name]
            tqdm.write(f"Stopping at step {state.global_step}: budget.{name} {limit:,} is reached ({spent:,})")


def limit_reached(limits: BudgetSection, totals: dict[str, float]) -> str | None:
    """Return the first key of `budget:` whose limit the totals have reached, or None."""
    given = limits.model_dump(exclude_none=True)
    return next((name for name, limit in given.items() if totals.get(name, 0) >= limit), None)


def spent_at(checkpoint: str | Path) -> dict[str, float]:
    """Return the totals saved in a checkpoint; empty if it has none."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    return state.get("stateful_callbacks", {}).get(_SAVED_AS, {})
