"""Runs of every method on a tiny model, each a process forked from this one, with what is injected: kills, signals."""

import gc
import json
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

import ebft.files
import ebft.preferences.experimental
import ebft.preferences.trainers
import ebft.reward_models
import ebft.run.output
import ebft.sft.trainer
import ebft.strided
import ebft.structured  # noqa: F401 (with those above: imported once, not by every process)
from ebft import errors, train
from ebft.run.callbacks import TrainingInterrupted
from ebft.run.config.schema import RunConfig
from ebft.tools.console import show_warnings
from tests.golden.runs import ROWS, is_of_the_machine
from tests.ranks import environment_of, exit_codes, print_stacks_at_signal
from tests.serving.processes import free_port
from tests.structured.conftest import save_chat_model

FORK = multiprocessing.get_context("fork")
LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
DROPOUT = {**LORA, "lora_dropout": 0.1}
LOGGED = {**LORA, "logging_steps": 2}  # metrics are logged over two steps
ACCUMULATED = {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
SAMPLED = {"stride": 8, "context_length": 4, "generate_max_len": 2, "n_samples_per_prompt": 2}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", **SAMPLED}}
TRL = {"num_generations": 2, "max_completion_length": 3}
STRUCTURED = {"rl": "ebft", "ebft": {"mode": "structured", "gt_length_floor": 1}, "micro_batch_size": 4, "trl": TRL}
OF_GRPO = {**TRL, "reward_funcs": ["tests.golden.runs.spaces_and_es"]}
SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
STREAM = {"streaming": True, "streaming_multipack_buffer_size": 3}
PAIRS = ("pairs", "ebft_opencode.transform")


def grpo(adapter: dict[str, Any] = LORA, **keys: Any) -> tuple[str, str, dict[str, Any]]:
    return (*PAIRS, {"rl": "grpo", **adapter, "micro_batch_size": 4, "trl": {**OF_GRPO, **keys}})


# Eight rows, of which two are held out: three steps per epoch with two rows per step. name -> (rows, transform, keys)
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("texts", "completion", DROPOUT),
    "sft_full": ("texts", "completion", ACCUMULATED),
    "sft_packed": ("texts", "completion", {"sample_packing": True}),
    # rows of documents that do not see each other, and a document that continues in the next row
    "stream": ("texts", "completion", {**STREAM, "gradient_accumulation_steps": 2}),
    "reward_model": ("comparisons", "bradley_terry.chat_template", {**DROPOUT, **LOGGED, "reward_model": True}),
    "dpo": ("comparisons", "chatml.icr", {**LOGGED, "rl": "dpo"}),
    "dpo_full": ("comparisons", "chatml.icr", {"rl": "dpo", **ACCUMULATED}),  # the reference is a copy
    "kto": ("judged", "chatml.intel", {**LOGGED, "rl": "kto"}),
    "orpo": ("comparisons", "chatml.icr", {**LOGGED, "rl": "orpo"}),
    "simpo": ("comparisons", "chatml.icr", {"rl": "simpo", "cpo_alpha": 0.2}),
    "process_reward_model": ("steps", "stepwise_supervised", {"process_reward_model": True, **ACCUMULATED}),
    "strided": ("texts", "ebft_pretrain.transform", {**STRIDED, **LORA}),
    "strided_full": ("texts", "ebft_pretrain.transform", {**STRIDED, **ACCUMULATED}),
    "structured": (*PAIRS, {**STRUCTURED, **LORA}),
    "structured_full": (*PAIRS, {**STRUCTURED, **ACCUMULATED, "micro_batch_size": 2}),
    "structured_reference": (*PAIRS, {**STRUCTURED, **LORA, "trl": {**TRL, "beta": 0.2}}),  # a second adapter
    "sdft": (*PAIRS, {"rl": "sdft", **LOGGED, "micro_batch_size": 4, "trl": TRL}),
    "grpo": grpo(),
    "grpo_reference": grpo(beta=0.2),
    "grpo_synced_reference": grpo({}, **SYNCED),
    "grpo_iterations": grpo(num_iterations=2, generation_batch_size=8),  # checkpoints lie between updates on one batch
    # groups without a signal are replaced by stored ones, failed prompts sampled again
    "grpo_second_uses": grpo(replay_buffer_size=4, reroll_start_fraction=0.2),
}
STEPS = 8


def write_inputs(folder: Path) -> None:
    """The model and the rows of all runs, in `folder`."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
    save_chat_model(folder / "model", **sizes)
    for name in ("texts", "pairs", "comparisons", "judged", "steps"):
        rows = ROWS[name.replace("texts", "text")]()[:8]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config_of(method: str, inputs: Path, out: Path, **changes: Any) -> RunConfig:
    rows, transform, keys = METHODS[method]
    data = [{"path": str(inputs / f"{rows}.jsonl"), "type": transform}]
    values = {"base_model": str(inputs / "model"), "datasets": data, "output_dir": str(out), "torch_dtype": "float32"}
    values |= {"test_datasets": data} if "streaming" in keys else {"val_set_size": 2}
    values |= {"sequence_len": 64, "micro_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2, "eval_steps": 3}
    values |= {"save_steps": 1, "save_total_limit": 2, "auto_resume_from_checkpoints": True, **keys, **changes}
    with warnings.catch_warnings(action="ignore"):
        return RunConfig.from_dict(values)


class Ended(NamedTuple):
    """How a run ended: its exit code, which is minus the number of a signal, and what it printed."""

    code: int
    output: str


def run(config: RunConfig, inject: Callable[[], None] = lambda: None) -> Ended:
    """Train in a process of its own, which calls `inject` first."""
    return run_processes(config, 1, inject)[0]


def trained(config: RunConfig, code: int = 0, inject: Callable[[], None] = lambda: None) -> str:
    """What a run printed that ended with this exit code."""
    ended = run(config, inject)
    assert ended.code == code and "Traceback" not in ended.output, ended.output
    return ended.output


def run_processes(config: RunConfig, count: int, inject: Callable[[], None] = lambda: None) -> list[Ended]:
    """Train in `count` processes, which all call `inject` first, as torchrun would start them."""
    port, processes = free_port(), []
    logs = [Path(f"{config.output_dir}-{rank}.log") for rank in range(count)]
    for rank, log in enumerate(logs):
        environment = environment_of(rank, count, port)
        processes.append(FORK.Process(target=_main, args=(config, environment, inject, log)))
        processes[-1].start()
    codes = exit_codes(processes)
    outputs = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    return [Ended(code, output) for code, output in zip(codes, outputs)]


def _main(config: RunConfig, environment: dict[str, str], inject: Callable[[], None], log: Path) -> None:
    """The whole life of a process that trains."""
    os.environ.update(environment)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    print_stacks_at_signal(sys.stderr)
    show_warnings()
    gc.freeze()  # what was imported is not searched again
    inject()
    try:
        train(config)
    except TrainingInterrupted as stop:
        print(stop)
        os._exit(128 + stop.signal_number)
    except errors.EBFTError as error:
        print(f"{type(error).__name__}: {error}")
        os._exit(2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


sends = lambda number: lambda: os.kill(os.getpid(), number)
kill, terminate, press_ctrl_c = map(sends, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))


def before(owner: Any, name: str, count: int, act: Callable[[], None] = kill) -> Callable[[], None]:
    """An injection: `act` before the call number `count`, from 1, of a function."""

    def inject() -> None:
        original, calls = getattr(owner, name), [0]

        def spy(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == count:
                act()
            return original(*args, **kwargs)

        setattr(owner, name, spy)

    return inject


def result(out: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The bytes of the final weights, and what was logged, apart from times."""
    (path,) = out.glob("*model.safetensors")
    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    skipped = lambda key: is_of_the_machine(key) or "preparation_time" in key
    return weights, [{key: value for key, value in entry.items() if not skipped(key)} for entry in history]


def without_summary(result: tuple[Any, list[dict[str, Any]]]) -> tuple[Any, list[dict[str, Any]]]:
    """A result without what is logged when training ends, which a run that was already trained does not log again."""
    weights, logged = result
    return weights, [entry for entry in logged if "total_flos" not in entry]


def as_resumed(step: int, wanted: tuple[Any, Any]) -> tuple[Any, Any]:
    """The result `wanted` of a run that was resumed at `step`."""
    return without_summary(wanted) if step == STEPS else wanted
