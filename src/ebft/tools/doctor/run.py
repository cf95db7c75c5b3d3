"""The checks of a config, in the order in which a run would fail, and one training step on its longest rows.

Each check is a line of the report. The step reports the peak memory of each phase, and saves nothing.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import get_token
from transformers import PreTrainedConfig, TrainerCallback

from ebft.catalog import base_name, is_gguf
from ebft.config.keys.run import BudgetSection
from ebft.machine import free_disk, gib, peak_resident
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.load import load_model, load_model_config, quantisation_config, usable_attention
from ebft.models.pretrained import find_base_model, load_tokenizer
from ebft.monitor.metrics import ConsoleMetrics
from ebft.prefix.forward import way_of
from ebft.printed import duration, say
from ebft.run import checkpoints, checks, reporting, training
from ebft.run.config.schema import RunConfig
from ebft.run.trainer import build_trainer, planned_steps, this_machine, training_arguments
from ebft.serving.command import find_interpreter
from ebft.serving.server import await_ready
from ebft.tools.doctor import rows as of_rows
from ebft.tools.doctor.environment import Attempt, Check
from ebft.tools.doctor.memory import Needs, advice, memory_checks, needs
from ebft.tools.doctor.rows import LongestRows

_SERVER_TIMEOUT = 5.0  # seconds


def check_config(config: RunConfig, *, step: bool = True) -> Iterator[Check]:
    """Yield the checks of a valid config; `step` also loads the model and runs one training step."""
    yield from (settings := Attempt("settings", checks.check_runnable, config, ok=f"valid for {config.method.name}"))
    devices = f"devices {', '.join(this_machine().devices)}"
    yield from (machine := Attempt("machine", checks.check_machine, config, this_machine(), ok=devices))
    named = lambda used: f"installed: {', '.join(used)}" if used else "none needed besides the required ones"
    yield from (packages := Attempt("packages of this config", _check_packages, config, ok=named))
    found = lambda: (find_base_model(config), load_model_config(config))
    yield from (model := Attempt("model", found, ok=lambda found: f"{found[0]} ({found[1].model_type})"))
    yield from (tokenizer := Attempt("tokenizer", load_tokenizer, config, ok=lambda found: f"{len(found):,} tokens"))
    data = None
    if not (tokenizer.failed or settings.failed):
        given = config, tokenizer.result, None if model.failed else model.result[1]
        yield from (data := Attempt("data", _load_data, *given, ok=_Data.described))
        if not data.failed:
            yield from of_rows.sequence_len_checks(config, data.result.longest, data.result.counts)
            needed, count = of_rows.rows_per_step(config), data.result.count
            if count is not None and needed > count:
                text = f"a step needs {needed:,} rows, but there are {count:,} training rows. Use smaller batches"
                yield Check("warning", "step size", text)
    needed_for_step = [settings, machine, packages]
    if config.uses_server:
        yield from (server := Attempt("server", _check_server, config, ok=str))
        needed_for_step.append(server)
    of_run = lambda found: str(found.resumable or found.newest or "a new run")
    yield from Attempt("checkpoint", checkpoints.find_checkpoints, config, ok=of_run)
    if config.hub_model_id:
        has_token = get_token() is not None  # the repository is created when training starts
        text = "logged in" if has_token else f"hub_model_id: {config.hub_model_id} needs a login. Run `hf auth login`"
        yield Check("ok" if has_token else "error", "hub", text)
    free, existing = free_disk(config.output_dir)
    writable = f"{config.output_dir} is writable, {gib(free)} free"
    yield from Attempt("output_dir", training.make_output_dir, existing, ok=writable)
    if model.failed or data is None or data.failed:
        what, done = ("step", "run") if step else ("memory", "estimated")
        yield Check("warning", what, f"not {done}, because model, tokenizer or data are missing (see above)")
        return
    memory, exceeded = Attempt("memory", needs, config, model.result[1], data.result.longest), False
    if memory.failed:  # its configuration lacks what the estimate reads
        yield Check("warning", "memory", f"cannot be estimated for this model: {memory.checks[-1].message}")
    else:
        for check in memory_checks(memory.result):
            yield check
            exceeded = exceeded or check.level == "error"
        kept, now = checkpoints.checkpoints_kept(config, data.result.count or 0), memory.result.now
        problem, text = checkpoints.disk_need(config, now.gradients, now.checkpoint, kept)
        yield Check("ok" if problem is None else "error", "disk", problem or text)
    if not step:
        return
    if exceeded or any(part.failed for part in needed_for_step):
        yield Check("warning", "step", "not run, because of the errors above")
        return
    yield from _step_checks(config, tokenizer.result, data.result, memory.result)


def _check_packages(config: RunConfig) -> list[str]:
    """Warn or raise for optional packages that the config needs; returns those that it uses."""
    used = ["gguf"] if is_gguf(base_name(config.base_model, config.gguf_file)) else []
    if config.load_in_4bit or config.load_in_8bit:
        quantisation_config(config, PreTrainedConfig())
        used.append("bitsandbytes")
    if (attention := usable_attention(config.attn_implementation)) is not None:
        used.append(f"{attention} attention")
    used += [name for name in reporting.trackers(config) if name != "none"]
    if config.deepspeed is not None and importlib.util.find_spec("deepspeed") is not None:
        used.append("deepspeed")
    return used


class _Data(NamedTuple):
    """Numbers of training rows, None of a stream, and of rows held out, the longest ones, and rows by reason."""

    count: int | None
    held_out: int
    longest: LongestRows
    counts: dict[str, int]

    def described(self) -> str:
        held_out = f"{self.held_out:,} held out" if self.held_out else "no held-out data"
        if self.count is None:
            return f"a stream, {held_out}; each row has {self.longest.described}"
        return f"{self.count:,} rows, {held_out}; the longest has {self.longest.described}"


def _load_data(config: RunConfig, tokenizer: Any, model_config: Any) -> _Data:
    rows = training.run_rows(config, tokenizer)
    train, evaluation = training.arranged(config, rows, model_config)
    if config.streaming:  # all rows have the same length
        rows_of_step = list(islice(train.rows(), of_rows.rows_per_step(config)))
        count, longest, counts = None, LongestRows(rows_of_step, (), config.sequence_len), {}
    else:
        longest = of_rows.longest_rows(config, train, of_rows.row_lengths(config, tokenizer, train))
        count, counts = len(train), rows.reports[0].counts
    return _Data(count, len(evaluation or ()), longest, counts)


def _check_server(config: RunConfig) -> str:
    """Check that the server answers, or that there is an interpreter to start one with."""
    if config.manages_server:
        return f"will be started with {find_interpreter(config.vllm.python)}"
    from ebft.structured.rollouts.client import VLLMClient

    with closing(VLLMClient(*config.server_address, _SERVER_TIMEOUT)) as client:
        client.wait_until_up()
        served = client.base_model()
    return f"{client.address} serves {served.get('root') or served['id']}"


def _step_checks(config: RunConfig, tokenizer: Any, data: _Data, needed: Needs | None) -> Iterator[Check]:
    say(
        f"Training for a step on the longest rows ({data.longest.described}), on a CPU for minutes; see --no-step ...",
        err=True,
    )
    memory = PhaseMemory()
    given = config, tokenizer, data.longest.data, memory
    attempt = Attempt("step", measure_step, *given, ok="one step on the longest rows")
    if attempt.failed:
        *others, error = attempt.checks
        hint = ""
        if "memory" in error.message.lower() and needed is not None:
            phase = memory.failed_in or needed.now.peak
            hint = f" It ran out of memory in {phase}.{advice(needed, phase)}"
        yield from [*others, Check("error", "step", error.message + hint)]
        return
    yield from attempt.checks
    if memory.way is not None:
        yield Check("ok", "rollouts", f"by {memory.way}")
    for name, peak in memory.peaks.items():
        yield Check("ok", f"peak memory, {name}", gib(peak) + " (peak of the run so far)" * (not memory.is_exact))
    yield _peak_check(memory, attempt.result, needed)
    steps = planned_steps(config, this_machine(), data.count or 0)
    seconds = memory.seconds * config.gradient_accumulation_steps / _micro_batches(config)
    text = f"{seconds:.3g} s per step on the longest rows, the first one included; {duration(seconds * steps)} for "
    yield Check("ok", "time", f"{text}{steps:,} steps at this speed, without evaluations and saves")


def _peak_check(memory: PhaseMemory, state: int, needed: Needs | None) -> Check:
    """The highest peak of any step: after the first, which was measured, the optimizer state is always in memory."""
    first = ("before loading", "model", "trainer setup", "optimizer")
    peaks = {name: peak + (0 if name in first else state) for name, peak in memory.peaks.items()}
    highest = max(peaks, key=lambda name: peaks[name])
    kind = "allocated on the GPU"
    if not torch.cuda.is_available():
        kind = "resident memory of the process, with libraries, loading and freed memory"
    text = f"{gib(peaks[highest])} in {highest} ({kind}"
    if state and highest not in first:
        text += f", with {gib(state)} of optimizer state, which is there from the second step on"
    return Check("ok", "peak memory", f"{text}).{advice(needed, highest)}")


_MOST_MICRO_BATCHES = 2  # the second one has the gradients of the first in memory; further ones need no more
# Keys that save, evaluate, report or end early, and their values for the step.
_NOTHING_SAVED: dict[str, Any] = {
    **dict.fromkeys(("save_steps", "saves_per_epoch", "resume_from_checkpoint", "hub_model_id", "report_to")),
    **dict.fromkeys(reporting.ASKED, False),
    "max_steps": 1,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "wandb_project": None,
    "plugins": [],
    "health": False,
    "logging_steps": 1,
    "log_rollouts": "none",
}


def measure_step(config: RunConfig, tokenizer: Any, rows: Any, memory: PhaseMemory) -> int:
    """Load the model, train for one step on `rows`, and measure the peak memory of its phases with `memory`. Returns
    the bytes of optimizer state on the device of the model, which later steps have from their start. Raises the errors
    of training; torch.OutOfMemoryError, or RuntimeError on the CPU, if the memory does not suffice."""
    with memory.phase("before loading"):  # Python, libraries and data
        pass
    with tempfile.TemporaryDirectory(prefix="ebft-doctor-") as folder:
        config = without_output(config, folder)
        with training.servers(config, folder) as server:
            args = training_arguments(config, rows=len(rows), has_eval=False)
            args.disable_tqdm = True
            with memory.phase("model"):
                model = load_model(config, tokenizer, config.method.head(config))
            if server is not None:
                await_ready(server, config.trl.vllm_server_timeout)
            with memory.phase("trainer setup"):
                trainer = build_trainer(config, args, model, tokenizer, rows, None, server)
            memory.way = way_of(unwrap_adapter(trainer.model)) if config.method.samples_blocks else None
            for name, method in config.method.phases.items():
                setattr(trainer, method, memory.phase(name)(getattr(trainer, method)))
            trainer.remove_callback(ConsoleMetrics)
            trainer.add_callback(OptimizerPhase(memory))
            checkpoints.rehearse(config, trainer)
            with memory.phase("loss and backward"):
                trainer.train()
            values = [value for state in trainer.optimizer.state.values() for value in state.values()]
            tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
            return sum(value.nbytes for value in tensors if value.device.type == args.device.type)


def _micro_batches(config: RunConfig) -> int:
    """The number of micro-batches of the measured step."""
    steps = config.gradient_accumulation_steps
    return steps if config.method.rows == "prompts" else min(steps, _MOST_MICRO_BATCHES)


def without_output(config: RunConfig, folder: str) -> RunConfig:
    """Return the config for one step that saves and reports nothing outside of `folder`."""
    changes = _NOTHING_SAVED | {"output_dir": folder, "budget": BudgetSection()}
    changes["gradient_accumulation_steps"] = _micro_batches(config)
    changes["ebft"] = config.ebft.model_copy(update={"log_completions": False})
    # A step that is skipped because all rewards are equal would not need the memory of others.
    changes["trl"] = config.trl.model_copy(update={"log_completions": False, "skip_zero_advantage_batches": False})
    return config.model_copy(update=changes)


class OptimizerPhase(TrainerCallback):
    """Measures the update of the weights as a phase of `phases`, and the seconds of the step."""

    def __init__(self, phases: Any) -> None:
        self.phases, self._update = phases, ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.seconds = time.perf_counter() - self._began

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._update.enter_context(self.phases.phase("optimizer"))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._update.close()


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PhaseMemory:
    """Peak memory in bytes by phase, in the order of their first use: `peaks`. Phases may be nested; memory used in an
    inner phase counts for the inner one only. On CUDA, the memory that PyTorch allocated on the current device;
    otherwise the resident memory of the process, whose high-water mark Linux lets a process reset. Elsewhere
    (`is_exact` is False) a phase is reported with the peak of the process so far. `failed_in` is the innermost phase in
    which an exception was raised, and `seconds` the time of the step."""

    seconds: float = 0.0
    way: str | None = None  # in which the model runs rollouts of blocks

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.failed_in: str | None = None
        self._active: list[str] = []
        self._on_cuda = torch.cuda.is_available()
        gc.collect()
        self.is_exact = self._on_cuda or self._reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, or each call of a decorated function, as a phase; repeated ones report their maximum."""
        self._record()
        self.peaks.setdefault(name, 0)
        self._active.append(name)
        try:
            yield
        except Exception:
            self.failed_in = self.failed_in or self._active[-1]
            raise
        finally:
            self._record()
            self._active.pop()

    def _record(self) -> None:
        """Add the peak since the last call to the innermost active phase."""
        if self._active:
            name = self._active[-1]
            peak = torch.cuda.max_memory_allocated() if self._on_cuda else peak_resident()
            with suppress(OSError, StopIteration):
                lines = () if self._on_cuda else _STATUS.read_text().splitlines()
                peak = 2**10 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
            self.peaks[name] = max(self.peaks[name], peak)
        self._reset()

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
