"""The checks of a config, in the order in which a run would fail, and one training step on its longest rows.

Each check is a line of the report. The step reports the peak memory of each phase, and saves nothing.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from ebft.catalog import is_gguf, require_gguf
from ebft.config.schema import RunConfig
from ebft.data.locate import base_name
from ebft.errors import ConfigError, ModelError
from ebft.machine import free_disk, gib
from ebft.models.load import (
    find_base_model,
    load_model,
    load_model_config,
    quantisation_config,
    usable_attention,
    usable_device_map,
)
from ebft.models.tokenizer import load_tokenizer
from ebft.monitor import ConsoleMetrics
from ebft.run.checkpoints import find_checkpoints
from ebft.run.checks import check_machine, check_runnable
from ebft.run.keys import BudgetSection
from ebft.run.rehearsal import rehearse
from ebft.run.trackers import trackers
from ebft.run.trainer import build_trainer, this_machine, training_arguments
from ebft.run.training import arranged, check_output_dir, run_rows
from ebft.serving.command import find_interpreter
from ebft.serving.server import await_ready, managed_server
from ebft.tools.doctor.environment import Attempt, Check
from ebft.tools.doctor.memory import Needs, advice, disk_check, exceeds, memory_checks, needs
from ebft.tools.doctor.rows import (
    LongestRows,
    described,
    first_of_stream,
    longest_rows,
    row_lengths,
    rows_per_step,
    sequence_len_checks,
)

_SERVER_TIMEOUT = 5.0  # seconds
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_config(config: RunConfig, *, step: bool = True) -> Iterator[Check]:
    """Yield the checks of a valid config; `step` also loads the model and runs one training step."""
    settings = Attempt("settings").run(check_runnable, config, ok=f"valid for {config.method.name}")
    yield from settings.checks
    machine = Attempt("machine").run(
        check_machine, config, this_machine(), ok=f"devices {', '.join(this_machine().devices)}"
    )
    yield from machine.checks
    packages = Attempt("packages of this config", (ImportError,)).run(_check_packages, config, ok=_named)
    yield from packages.checks
    model = Attempt("model").run(_find_model, config, ok=lambda found: found[0])
    yield from model.checks
    tokenizer = Attempt("tokenizer").run(load_tokenizer, config, ok=lambda found: f"{len(found):,} tokens")
    yield from tokenizer.checks
    data = None
    if not (tokenizer.failed or settings.failed):
        model_config = None if model.failed else model.result[1]
        data = Attempt("data", (ImportError,)).run(_load_data, config, tokenizer.result, model_config, ok=_described)
        yield from data.checks
        if not data.failed:
            yield from sequence_len_checks(config, data.result.longest, data.result.counts)
            if data.result.count is not None:
                yield from step_size_checks(config, data.result.count)
    server = Attempt("server").run(_check_server, config, ok=lambda found: found)
    if config.uses_server:
        yield from server.checks
    checkpoint = Attempt("checkpoint").run(
        find_checkpoints, config, ok=lambda found: str(found.resumable or found.newest or "a new run")
    )
    yield from checkpoint.checks
    if config.hub_model_id:
        yield from Attempt("hub").run(_check_login, config, ok="logged in").checks
    output = Attempt("output_dir").run(_check_output_dir, config, ok=lambda found: found)
    yield from output.checks
    if model.failed or data is None or data.failed:
        yield Check("warning", "step", "not run, because the model or the data are missing (see above)")
        return
    rows = data.result.longest
    found = Attempt("memory", (ValueError, RuntimeError, AttributeError)).run(_estimated, config, model.result[1], rows)
    needed = None if found.failed else found.result
    if needed is None:
        yield Check("warning", "memory", f"cannot be estimated for this model: {found.checks[-1].message}")
    else:
        yield from memory_checks(needed)
        yield disk_check(config, needed.of(config), data.result.count or 0)
    if not step:
        return
    failed = [part for part in (settings, machine, packages, server) if part.failed]
    if failed or (needed is not None and exceeds(needed.of(config))):
        yield Check("warning", "step", "not run, because of the errors above")
        return
    yield from _step_checks(config, tokenizer.result, rows, needed)


def _check_packages(config: RunConfig) -> list[str]:
    """Warn or raise for optional packages that the config needs; returns those that it uses."""
    used = []
    if config.load_in_4bit or config.load_in_8bit:
        quantisation_config(config)
        used.append("bitsandbytes")
    file = base_name(config.base_model, config.gguf_file)
    if is_gguf(file):
        require_gguf(file)
        used.append("gguf")
    attention = usable_attention(config.attn_implementation)
    if attention is not None:
        used.append(f"{attention} attention")
    usable_device_map(config.device_map)
    used += [name for name in trackers(config) if name != "none"]
    if config.deepspeed is not None and importlib.util.find_spec("deepspeed") is not None:
        used.append("deepspeed")
    return used


def _named(used: list[str]) -> str:
    return f"installed: {', '.join(used)}" if used else "none needed besides the required ones"


def _find_model(config: RunConfig) -> tuple[str, Any]:
    """Return a description of the model and its transformers configuration."""
    found, model_config = find_base_model(config), load_model_config(config)
    folder = Path(found)
    if folder.is_dir() and not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise ModelError(
            f"base_model: {found} has no weights ({', '.join(_WEIGHTS)}). An adapter is set with lora_model_dir; for a "
            "checkpoint that FSDP2 has saved in parts, run `ebft merge-sharded` first."
        )
    return f"{found} ({model_config.model_type})", model_config


class _Data(NamedTuple):
    """Numbers of training rows and of rows held out, the longest training rows, and numbers of rows by reason.

    The number of training rows of a stream is None.
    """

    config: RunConfig
    count: int | None
    held_out: int
    longest: LongestRows
    counts: dict[str, int]


def _load_data(config: RunConfig, tokenizer: Any, model_config: Any) -> _Data:
    rows = run_rows(config, tokenizer)
    train, evaluation = arranged(config, rows, model_config)
    if config.streaming:  # all rows have the same length
        return _Data(config, None, len(evaluation or ()), first_of_stream(config, train), {})
    longest = longest_rows(config, train, row_lengths(config, tokenizer, train))
    return _Data(config, len(train), len(evaluation or ()), longest, rows.reports[0].counts)


def step_size_checks(config: RunConfig, count: int) -> Iterator[Check]:
    """A warning if an optimizer step needs more rows than there are."""
    needed = rows_per_step(config)
    if needed > count:
        yield Check(
            "warning",
            "step size",
            f"one optimizer step needs {needed:,} rows, but there are {count:,} training rows. "
            "Decrease gradient_accumulation_steps or the batch size, or use more data.",
        )


def _described(data: _Data) -> str:
    held_out = f"{data.held_out:,} held out" if data.held_out else "no held-out data"
    if data.count is None:
        return f"a stream, {held_out}; each row has {described(data.config, data.longest)}"
    return f"{data.count:,} rows, {held_out}; the longest has {described(data.config, data.longest)}"


def _estimated(config: RunConfig, model_config: Any, rows: LongestRows) -> Needs:
    found = needs(config, model_config, rows)
    found.of(config)  # raises for models whose configuration lacks what the estimate reads
    return found


def _check_server(config: RunConfig) -> str:
    """Check that the server answers, or that there is an interpreter to start one with."""
    if not config.uses_server:
        return ""
    if config.manages_server:
        return f"will be started with {find_interpreter(config.vllm.python)}"
    from ebft.structured.rollouts.client import VLLMClient

    client = VLLMClient(*config.server_address, _SERVER_TIMEOUT)
    try:
        client.wait_until_up()
        served = client.base_model()
    finally:
        client.close()
    return f"{client.address} serves {served.get('root') or served['id']}"


def _check_login(config: RunConfig) -> None:
    """Check that there is a token; the repository is created when training starts."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(f"hub_model_id: {config.hub_model_id} needs a login. Run `hf auth login`, or remove it.")


def _check_output_dir(config: RunConfig) -> str:
    free, existing = free_disk(config.output_dir)
    check_output_dir(existing)
    return f"{config.output_dir} is writable, {gib(free)} free"


def _step_checks(config: RunConfig, tokenizer: Any, rows: LongestRows, needed: Needs | None) -> Iterator[Check]:
    attempt = Attempt("step", (RuntimeError, ValueError, OSError, ImportError))  # torch.OutOfMemoryError is the first
    memory = PhaseMemory()
    attempt.run(measure_step, config, tokenizer, rows.data, memory, ok="one step on the longest rows")
    if attempt.failed:
        *others, error = attempt.checks
        hint = ""
        if "memory" in error.message.lower() and needed is not None:
            phase = memory.failed_in or needed.of(config).peak
            hint = f" It ran out of memory in {phase}.{advice(needed, phase)}"
        yield from [*others, Check("error", "step", error.message + hint)]
        return
    yield from attempt.checks
    for name, peak in memory.peaks.items():
        yield Check(
            "ok", f"peak memory, {name}", gib(peak) if memory.is_exact else f"{gib(peak)} (peak of the run so far)"
        )
    yield _peak_check(memory, attempt.result, needed)


def _peak_check(memory: PhaseMemory, state: int, needed: Needs | None) -> Check:
    """The highest peak of any step: after the first, which was measured, the optimizer state is always in memory."""
    first = ("before loading", "model", "trainer setup", "optimizer")
    peaks = {name: peak + (0 if name in first else state) for name, peak in memory.peaks.items()}
    highest = max(peaks, key=lambda name: peaks[name])
    kind = "allocated on the GPU" if torch.cuda.is_available() else "resident memory of the process"
    text = f"{gib(peaks[highest])} in {highest} ({kind}"
    if state and highest not in first:
        text += f", with {gib(state)} of optimizer state, which is there from the second step on"
    return Check("ok", "peak memory", f"{text}).{advice(needed, highest)}")


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
                model = load_model(config, tokenizer, config.method.head(config))
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
            values = [value for state in trainer.optimizer.state.values() for value in state.values()]
            tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
            return sum(value.nbytes for value in tensors if value.device.type == args.device.type)


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
