"""`python -m tests.devices [CASE ...]`: train each case on the pretend accelerator and on CPU, and compare. Prints what
the second step starts and waits for, by line of `src/ebft`. Fails if an operation mixes devices, which names the line,
if a logged number or a trained weight is not the CPU's, or if a step waits more often than it may."""

import argparse
import contextlib
import gc
import importlib
import io
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from transformers import TrainerCallback

import ebft
from ebft.prefix.attention import flex
from ebft.tools.evaluation.run import evaluate
from tests.devices.pretend import NAME, Counts, pretend_device, record, register
from tests.golden.runs import LORA, RUNS, is_of_the_machine, write_inputs
from tests.nemo_gym.stand_in_vllm import StandInVLLM
from tests.strided.test_flex import CALLS, dense_kernel

# The kernels of a GPU's choices add in another order than those of a CPU's.
TOLERANCE = 2e-4
# What a GPU does by default, so that the CPU computes the same.
AS_ON_GPU = {"ebft.single_pass": False, "ebft.merge_rollouts": False}
STEPS = {"max_steps": 2, "eval_steps": 2, "log_rollouts": "none"}  # as most steps of a long run
# Runs without a golden file, as in RUNS.
OTHERS = {"kto": ("judged", "chatml.intel", {"rl": "kto", **LORA})}
OTHERS["orpo"] = ("comparisons", "chatml.icr", {"rl": "orpo", **LORA})


@dataclass(frozen=True)
class Case:
    """A golden run with other keys, those of the device alone, and the most waits of a step. `only_finite`: in 16 bits,
    and with tiles of other sizes, random numbers select other tokens or weights than on CPU. `during` is the context of
    a run in a folder, on the device or not, and gives further keys, if any. `then` computes further numbers after it.
    `copied`: the tokens up to which prompts are copied to their samples."""

    golden: str
    keys: dict[str, Any] = field(default_factory=dict)
    on_device: dict[str, Any] = field(default_factory=dict)
    most_waits: int | None = None
    only_finite: bool = False
    during: Callable[[Path, bool], Any] = lambda folder, on_device: nullcontext()
    then: Callable[[ebft.RunConfig], dict[str, float]] | None = None
    copied: int = 128


@dataclass
class Result:
    """What a run logged, the weights that it trained, and what the device did in its second step."""

    logged: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    counts: Counts


@contextlib.contextmanager
def flex_kernel(folder: Path, on_device: bool) -> Iterator[dict[str, Any]]:
    """Masks and indices of flex_attention are made on the device, and its kernel is one of matrix products."""
    with (
        patch("ebft.models.load.usable_attention", lambda wanted: wanted),
        patch.object(flex, "available", lambda device: device.type == NAME),
        patch.object(flex, "_kernel", lambda compiled: dense_kernel),
    ):
        CALLS.clear()
        yield {"attn_implementation": "flex_attention"} if on_device else {}
    assert bool(CALLS) == on_device


@contextlib.contextmanager
def attention_dropout(folder: Path, on_device: bool) -> Iterator[None]:
    """Tiles draw what they drop from a generator of the device."""
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.1}))
    yield


@contextlib.contextmanager
def server(folder: Path, on_device: bool) -> Iterator[dict[str, Any]]:
    """Completions come from a server, ahead of time."""
    made = StandInVLLM(folder / "model")
    try:
        yield {"trl.use_vllm": True, "trl.vllm_mode": "server", "trl.vllm_server_port": made.port}
    finally:
        made.stop()
    assert len(made.loaded) > 1


class Cuda:
    """What the package calls of `torch.cuda` while it trains."""

    is_available = staticmethod(lambda: True)
    get_rng_state_all = staticmethod(lambda: [torch.get_rng_state()])
    set_rng_state_all = staticmethod(lambda states: torch.set_rng_state(*states))
    max_memory_allocated, max_memory_reserved = Mock(return_value=2**30), Mock(return_value=2**30)
    empty_cache = staticmethod(lambda: None)


@contextlib.contextmanager
def as_cuda(folder: Path, on_device: bool) -> Iterator[None]:
    """Modules of the package, but no other package, find CUDA."""
    names = ("trainer.base", "trainer.checkpoints", "monitor.metrics", "tools.evaluation.run")
    modules = [importlib.import_module(f"ebft.{name}") for name in names]
    mixed = SimpleNamespace(**{**vars(torch), "cuda": Cuda})
    Cuda.max_memory_reserved.reset_mock()
    with contextlib.ExitStack() as patches:
        for module in modules if on_device else ():
            patches.enter_context(patch.object(module, "torch", mixed))
        yield
    assert Cuda.max_memory_reserved.called == on_device


def evaluated(config: ebft.RunConfig) -> dict[str, float]:
    """What `ebft evaluate` measures of the base model and the trained one."""
    models = evaluate(config, [config.base_model, config.output_dir]).models
    return {f"{number} {key}": value for number, each in enumerate(models) for key, value in each.metrics.items()}


REPLAY = {"max_steps": 4, "trl.reward_funcs": ["tests.devices.__main__.of_two_in_three"]}
REPLAY |= {"trl.replay_buffer_size": 8, "trl.reroll_start_fraction": 0.5}


def of_two_in_three(completions: list[Any], **columns: Any) -> list[float]:
    """A reward without a signal for some prompts: whose last token has an even length."""
    return [float(number % 4) if number // 4 % 3 else 0.0 for number in range(len(completions))]


RESUMED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
WAITS = {"strided_lora": 5, "strided_packed": 4, "structured_single_turn": 54, "structured_cross_entropy": 55,
         "grpo": 56, "sft": 12, "dpo": 37, "reward_model": 10, "process_reward_model": 6}  # fmt: skip
CASES = {name: Case(name, most_waits=waits) for name, waits in WAITS.items()} | {
    "strided_full": Case("strided_full", on_device={"ebft.feature_device": "pretend:1"}, most_waits=5),
    "strided_single_pass": Case(  # of which each level of the tree of rollouts is waited for
        "strided_lora", AS_ON_GPU | {"ebft.single_pass": True, "ebft.merge_rollouts": True}, most_waits=30),
    "strided_accumulation": Case("strided_accumulation", {"ebft.rollout_tokens_per_pass": 64}, most_waits=7),
    "strided_dropout": Case("strided_lora", {"lora_dropout": 0.1, "ebft.disable_dropout": False}, most_waits=5),
    "strided_resumed": Case("strided_lora", RESUMED, most_waits=5),
    "structured_several_turns": Case(
        "structured_several_turns",
        {"gradient_checkpointing": True, "log_rollouts": "all", "trl.log_completions": True},
        {"ebft.feature_device": "pretend:1"}, most_waits=72),
    "structured_batched": Case(
        "structured_several_turns", on_device={"ebft.feature_device": "cpu"}, copied=0, most_waits=71),
    "structured_resumed": Case("structured_single_turn", RESUMED, most_waits=54),
    # What is rarer.
    "strided_cpu_features": Case(
        "strided_full", {"gradient_checkpointing": True}, {"ebft.feature_device": "cpu"}, most_waits=9),
    "strided_grad_norms": Case("strided_lora", {"ebft.grad_norms_every": 2}, most_waits=6),
    "strided_attention_dropout": Case(
        "strided_full", {"ebft.disable_dropout": False}, only_finite=True, during=attention_dropout, most_waits=5),
    "strided_evaluated": Case("strided_full", most_waits=5, then=evaluated),
    "strided_as_cuda_resumed": Case("strided_lora", RESUMED, most_waits=5, during=as_cuda, then=evaluated),
    "structured_evaluated": Case("structured_single_turn", then=evaluated),
    "strided_flex": Case("strided_lora", during=flex_kernel, most_waits=5),
    "strided_bf16": Case("strided_full", {"torch_dtype": "bfloat16"}, only_finite=True, most_waits=5),
    "strided_autocast": Case("strided_lora", {"bf16": True}, only_finite=True, most_waits=5),
    "structured_accumulation": Case(
        "structured_single_turn", {"gradient_accumulation_steps": 3, "ebft.rollout_tokens_per_pass": 64}),
    "structured_plain": Case("structured_single_turn", {"ebft.shared_prefix": False}),
    "structured_autocast": Case("structured_single_turn", {"bf16": True}, only_finite=True),
    "structured_async": Case(
        "structured_single_turn", {"trl.async_prefetch": True, "max_steps": 4}, only_finite=True, during=server),
    "grpo_replay": Case("grpo", REPLAY),
    "grpo_several_updates": Case("grpo", {"trl.num_iterations": 2, "trl.beta": 0.1}),
    "sft_packed": Case("sft", {"sample_packing": True}),
    "sft_autocast": Case("sft", {"bf16": True, "gradient_checkpointing": True}, only_finite=True),
    "kto": Case("kto"),
    "orpo": Case("orpo"),
}  # fmt: skip


class CountStep(TrainerCallback):
    """Counts from the end of the first step to the end of the second."""

    def __init__(self, counts: Counts):
        self._counts, self.of_step = counts, Counts()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._before = self._counts.copy()
        elif state.global_step == 2:
            self.of_step = self._counts.since(self._before)


def run(case: Case, folder: Path, on_device: bool, **keys: Any) -> Result:
    """Train a case in `folder`, which contains its inputs."""
    folder.mkdir(exist_ok=True)
    as_on_gpu = AS_ON_GPU if case.golden.startswith("strided") and not on_device else {}
    shorter = {"trl.max_completion_length": 4} if case.golden.startswith(("structured", "grpo")) else {}
    keys = {**STEPS, **shorter, **as_on_gpu, **case.keys, **(case.on_device if on_device else {}), **keys}
    path = write_inputs(case.golden, folder, RUNS | OTHERS)
    with contextlib.ExitStack() as during:
        during.enter_context(pretend_device() if on_device else nullcontext())
        keys |= during.enter_context(case.during(folder, on_device)) or {}
        config = ebft.load_config(path, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
        step = CountStep(during.enter_context(record()))
        during.enter_context(patch("ebft.run.trainer.ProgressBar", step))
        during.enter_context(patch("ebft.prefix.attention.decoding._SHORT", case.copied))
        during.enter_context(contextlib.redirect_stdout(io.StringIO()))
        during.enter_context(contextlib.redirect_stderr(io.StringIO()))
        during.enter_context(warnings.catch_warnings(action="ignore"))
        trainer = ebft.train(config).trainer
        further = [case.then(config)] if case.then else []
        weights = {key: w.detach().cpu().clone() for key, w in trainer.model.named_parameters() if w.requires_grad}
    # Samples that have ended are computed until the device is asked which have.
    left_out = {"budget/flops", "total_flos"} if hasattr(trainer, "generation") else set()
    logged = [
        {key: value for key, value in entry.items() if not is_of_the_machine(key) and key not in left_out}
        for entry in [*trainer.state.log_history, *further]
    ]
    return Result(logged, weights, step.of_step)


def differences(found: Result, wanted: Result, tolerance: float) -> list[str]:
    """The numbers and weights of two runs that differ by more than `tolerance`; infinite ones allow finite numbers."""
    if [sorted(entry) for entry in found.logged] != [sorted(entry) for entry in wanted.logged]:
        return ["other metrics are logged"]
    of_logs = [
        f"entry {number}: {key}: {got[key]}, on CPU {value}"
        for number, (got, expected) in enumerate(zip(found.logged, wanted.logged))
        for key, value in expected.items()
        if not (tolerance == inf and isfinite(got[key]))
        if not (key in ("budget/flops", "total_flos") and got[key] < value)  # adapters are folded into the weights
        if not abs(got[key] - value) <= tolerance * max(1.0, abs(value))
    ]
    of_weights = [
        f"{name}: largest difference {(found.weights[name] - weight).abs().max():.1e}"
        for name, weight in wanted.weights.items()
        if not torch.allclose(found.weights[name], weight, rtol=tolerance, atol=tolerance)
    ]
    return of_logs + of_weights


def problems(case: Case, resumes: bool) -> tuple[list[str], Counts]:
    """Train a case on both devices; what is wrong, and what the device did."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = run(case, Path(folder, "cpu"), on_device=False)
        found = run(case, Path(folder, "device"), on_device=True)
        wrong = differences(found, wanted, inf if case.only_finite else TOLERANCE)
        if resumes:
            resumed = {"resume_from_checkpoint": str(Path(folder, "device", "out", "checkpoint-2"))}
            resumed["output_dir"] = str(Path(folder, "resumed"))
            again = run(case, Path(folder, "device"), on_device=True, **resumed)
            wrong += [f"resumed: {line}" for line in differences(again, found, 0.0)]
    for line, operation in found.counts.waits:
        if operation == "index on CPU" and not line.startswith("("):
            wrong.append(f"{line} indexes a tensor of the device with one on CPU, which is copied and waited for")
    waits = sum(found.counts.waits.values())
    if case.most_waits is not None and waits > case.most_waits:
        wrong.append(f"a step waits {waits} times for the device, and may wait {case.most_waits} times")
    return wrong, found.counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.devices", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--lines", type=int, default=20, help="print the first lines of each table")
    options = parser.parse_args(arguments)
    register()
    torch.set_num_threads(1)
    gc.freeze()  # every training has a collection, which takes a second with all that is imported
    fails = False
    for name in options.cases or CASES:
        try:
            wrong, counts = problems(CASES[name], resumes=name.endswith("resumed"))
        except Exception:  # of any kind: the next case is tried
            wrong, counts = [traceback.format_exc()], Counts()
        print(f"{name}: one step\n{counts.table(options.lines)}", flush=True)
        for line in wrong:
            fails = True
            print(f"{name}: WRONG {line}", flush=True)
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
