"""One training step of a config on its longest rows, with the peak memory of each phase. Nothing is saved."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ebft.config.schema import RunConfig
from ebft.models.load import load_model
from ebft.monitor import ConsoleMetrics
from ebft.run.keys import BudgetSection
from ebft.run.rehearsal import rehearse
from ebft.run.trainer import build_trainer, this_machine, training_arguments
from ebft.serving.server import await_ready, managed_server

_MOST_MICRO_BATCHES = 2  # the second one has the gradients of the first in memory; further ones need no more
# Keys that save, evaluate, report or end early, and their values for the step.
_NOTHING_SAVED = {
    "max_steps": 1,
    "save_strategy": "no",
    "save_steps": None,
    "saves_per_epoch": None,
    "resume_from_checkpoint": None,
    "load_best_model_at_end": False,
    "hub_model_id": None,
    "report_to": None,
    "use_tensorboard": False,
    "use_wandb": False,
    "use_trackio": False,
    "wandb_project": None,
    "plugins": [],
    "health": False,
    "logging_steps": 1,
}


def measure_step(config: RunConfig, tokenizer: Any, rows: Any, memory: PhaseMemory) -> int:
    """Load the model, train for one step on `rows`, and measure the peak memory of its phases with `memory`.

    Returns the bytes of optimizer state on the device of the model, which later steps have from their start. Raises the
    errors of training; torch.OutOfMemoryError, or RuntimeError on the CPU, if the memory does not suffice.
    """
    memory.begin("before loading")  # Python, libraries and data
    memory.end()
    with tempfile.TemporaryDirectory(prefix="ebft-doctor-") as folder:
        config = without_output(config, folder)
        settings = config.server_settings if config.manages_server else None
        managed = managed_server(settings, folder, torch.cuda.device_count(), this_machine().processes)
        with config.method.services(config), managed as server:
            args = training_arguments(config, rows=len(rows), has_eval=False)
            args.disable_tqdm = True
            with memory.phase("model"):
                model = load_model(
                    config,
                    tokenizer,
                    gradient_checkpointing=config.gradient_checkpointing,
                    head=config.method.head(config),
                )
            await_ready(server, config.trl.vllm_server_timeout)
            with memory.phase("trainer setup"):
                trainer = build_trainer(config, args, model, tokenizer, rows, None, server)
            for name, method in config.method.phases.items():
                setattr(trainer, method, memory.measured(name, getattr(trainer, method)))
            trainer.remove_callback(ConsoleMetrics)
            trainer.add_callback(_OptimizerPhase(memory))
            rehearse(config, trainer)
            with memory.phase("loss and backward"):
                trainer.train()
            return _state_bytes(trainer.optimizer, args.device)


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(x.nbytes for x in values if isinstance(x, torch.Tensor) and x.device.type == device.type and x.dim())


def without_output(config: RunConfig, folder: str) -> RunConfig:
    """Return the config for one step that saves and reports nothing outside of `folder`."""
    changes = _NOTHING_SAVED | {"output_dir": folder, "budget": BudgetSection()}
    if config.method.rows != "prompts":
        changes["gradient_accumulation_steps"] = min(config.gradient_accumulation_steps, _MOST_MICRO_BATCHES)
    changes["ebft"] = config.ebft.model_copy(update={"log_completions": False})
    # A step that is skipped because all rewards are equal would not need the memory of others.
    changes["trl"] = config.trl.model_copy(update={"log_completions": False, "skip_zero_advantage_batches": False})
    return config.model_copy(update=changes)


class _OptimizerPhase(TrainerCallback):
    """Measures the update of the weights as a phase."""

    def __init__(self, memory: PhaseMemory) -> None:
        self.memory = memory

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.end()


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PhaseMemory:
    """Peak memory in bytes by phase, in the order of their first use: `peaks`.

    Phases may be nested; memory used in an inner phase counts for the inner one only. On CUDA, the memory that PyTorch
    allocated on the current device; otherwise the resident memory of the process, whose high-water mark Linux lets a
    process reset. Elsewhere (`is_exact` is False) a phase is reported with the peak of the process so far. `failed_in`
    is the innermost phase in which an exception was raised.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.failed_in: str | None = None
        self._active: list[str] = []
        self._on_cuda = torch.cuda.is_available()
        gc.collect()
        self.is_exact = self._on_cuda or self._reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase; repeated phases report their maximum."""
        self.begin(name)
        try:
            yield
        except Exception:
            self.failed_in = self.failed_in or self._active[-1]
            raise
        finally:
            self.end()

    def begin(self, name: str) -> None:
        self._record()
        self.peaks.setdefault(name, 0)
        self._active.append(name)

    def end(self) -> None:
        self._record()
        self._active.pop()

    def measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` such that each of its calls is measured as a phase."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def _record(self) -> None:
        """Add the peak since the last call to the innermost active phase."""
        if self._active:
            name = self._active[-1]
            self.peaks[name] = max(self.peaks[name], self._peak())
        self._reset()

    def _peak(self) -> int:
        if self._on_cuda:
            return torch.cuda.max_memory_allocated()
        with suppress(OSError, StopIteration):
            lines = _STATUS.read_text().splitlines()
            return 2**10 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 2**10

    def _reset(self) -> bool:
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return True
        try:
            # Freed memory that the allocator keeps is resident, and would be counted again.
            ctypes.CDLL(None).malloc_trim(0)
            _RESET.write_text("5")
        except (OSError, AttributeError, TypeError):  # not Linux with glibc
            return False
        return True
