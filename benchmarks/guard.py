"""FLOPs, peak memory, kernels and waits of one training step, compared with the stored ones.

    python -m benchmarks.guard                     # compare; exit code 1 if one grew, or work is missing
    python -m benchmarks.guard --write             # store what is measured now, after a change that is meant
    python -m benchmarks.guard --write --launches  # the same with kernels and waits alone, which takes half the time

Each method trains a small random Llama with `ebft.train`, and its third step is measured: the FLOPs of all matrix
products (`benchmarks.flops`), and the most bytes of tensors at any time: those that live when the step begins, and what
PyTorch's allocator has handed out since. Both are counted rather than sampled, and do not depend on the machine or its
load. The seconds of the step are printed but not compared. Runs on the CPU, in about two minutes.

FLOPs or kernels that fall by 1% are an error too: work that is left out by mistake looks like a saving.

Kernels and waits are those of a step of `benchmarks.kernels`, which is counted on the pretend device of tests/devices:
what it starts on an accelerator, and how often it waits for it. 1% more kernels, or one more wait, is an error, which
names the functions that start or wait for more; so are 5% more calls of Python functions. Where they cannot be
counted, the rest is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

import ebft
from benchmarks.flops import flop_counter
from benchmarks.kernels import LORA, RUNS, STRIDED, counts_of_run, host_work, silence, write_inputs
from benchmarks.measuring import machine
from tests.devices.pretend import Counts, is_possible, register

STORED = Path(__file__).parent / "results" / "guard-cpu.json"
TOLERANCE = 0.01
QUANTITIES = ("flops", "peak_bytes")
STEP = 3  # first steps allocate optimizer states and import what is imported lazily
WORDS = 8190
TOKENS = 512  # of the document of the runs whose kernels are counted
MORE_CALLS = 0.05
SHOWN = 8  # functions that are named where kernels or waits changed
NOT_COUNTED = "Kernels and waits are not counted: there is an accelerator, or this PyTorch cannot pretend one."

COMMON = {"sequence_len": 256, "micro_batch_size": 4, "max_steps": STEP, "learning_rate": 1e-4, "seed": 1}
COMMON |= {"save_strategy": "no", "torch_dtype": "float32"}
COMPLETIONS = {"num_generations": 4, "max_completion_length": 32, "temperature": 1.0}
STRUCTURED = {"rl": "ebft", "ebft": {"mode": "structured"}, "trl": COMPLETIONS}
GRPO = {"rl": "grpo", "trl": {**COMPLETIONS, "reward_funcs": ["benchmarks.guard.even_words"]}}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (transform, keys)
    "strided": ("ebft_strided_structured.transform", STRIDED),
    "strided LoRA": ("ebft_strided_structured.transform", {**STRIDED, **LORA}),
    "structured LoRA": ("ebft_opencode.transform", {**STRUCTURED, **LORA}),
    "GRPO LoRA": ("ebft_opencode.transform", {**GRPO, **LORA}),
    "SFT": ("chat_template", {}),
    "SFT, all logits": ("chat_template", {"chunked_cross_entropy": False}),
    "SFT LoRA": ("chat_template", LORA),
    "DPO LoRA": ("chatml.intel", {"rl": "dpo", **LORA}),
    "ORPO LoRA": ("chatml.intel", {"rl": "orpo", **LORA}),
    "reward model": ("bradley_terry.chat_template", {"reward_model": True}),
}


@dataclass(frozen=True)
class Cost:
    """Of one training step: FLOPs of matrix products, bytes of tensors at the peak, seconds."""

    flops: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Launches:
    """Of one training step on an accelerator: kernels and waits by function, and the calls of `host_work`."""

    kernels: dict[str, int]
    waits: dict[str, int]
    calls: int = 0


class MeasureStep(TrainerCallback):
    """Measures the step number `STEP` of a training run."""

    def __init__(self) -> None:
        self.cost: Cost | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STEP - 1:
            self._held = live_bytes()
            self._counter: FlopCounterMode = flop_counter().__enter__()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True).__enter__()
            self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEP:
            seconds = time.perf_counter() - self._start
            self._profile.__exit__(None, None, None)
            self._counter.__exit__(None, None, None)
            peak = self._held + peak_bytes(self._profile)
            self.cost = Cost(self._counter.get_total_flops(), peak, seconds)


def live_bytes() -> int:
    """The bytes of all tensors that live now; those that share memory count once."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # of modules that are asked for their class
        found = [
            each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"
        ]
    storages = [each.untyped_storage() for each in found]
    held = [storage for storage in storages if storage.device.type == "cpu"]  # those of traced tensors have no memory
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def peak_bytes(profiled: profile) -> int:
    """The largest sum of allocations minus releases since the profiler started."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measure(name: str) -> Cost:
    """Train with the method `name`, and return the cost of its measured step."""
    transform, keys = METHODS[name]
    step = MeasureStep()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as during:
        during.enter_context(patch("ebft.run.trainer.ProgressBar", step))
        # The library of matrix products, and with it the peak, would depend on the processor.
        during.enter_context(patch("ebft.prefix.cpu._onednn_is_faster", lambda: False))
        during.enter_context(silence())
        ebft.train(ebft.RunConfig.from_dict({**COMMON, **keys, **inputs_of(transform, Path(folder))}))
    if step.cost is None:
        raise RuntimeError(f"The run of {name} ended before step {STEP}.")
    return step.cost


def inputs_of(transform: str, folder: Path) -> dict[str, Any]:
    """`write_inputs` with a small model, and rows of unequal lengths that every transform in use here understands."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    rows = [pair(sentence(row, 24 + 4 * row), " " + sentence(row + 50, 40 + 8 * row)) for row in range(16)]
    return write_inputs(folder, transform, rows, WORDS, {**shape, "num_hidden_layers": 4}, after=" <end> ")


def pair(prompt: str, answer: str) -> dict[str, Any]:
    """A row that every transform in use here understands."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    pair = {"question": prompt, "chosen": answer, "rejected": " ".join(reversed(answer.split()))}
    return {"input": prompt, "output": answer, "messages": messages, **pair}


def sentence(number: int, length: int) -> str:
    """`length` words that depend on `number` alone."""
    return " ".join(f"w{(number * 7919 + place * place) % WORDS}" for place in range(length))


def even_words(completions: list[Any], **columns: Any) -> list[float]:
    """The reward of GRPO: the share of words with an even last digit, which differs between completions."""
    words = [str(text).split() for text in completions]
    return [sum(word[-1] in "02468" for word in found) / max(1, len(found)) for found in words]


def launches(name: str) -> Launches:
    """Count what a step of a run of `benchmarks.kernels` starts and waits for, with 512 tokens."""
    register()
    total = Counts()
    for counts in counts_of_run(name, TOKENS).values():
        total.add(counts)
    kernels, waits = total.by_function()
    return Launches(dict(sorted(kernels.items())), dict(sorted(waits.items())), host_work(name, steps=3)[0])


def unmatched(stored: dict[str, Any], now: dict[str, Any], what: str) -> Iterable[str]:
    """A line for everything that is not on both sides."""
    for name in stored.keys() - now.keys():
        yield f"{name}: {what} are stored, but not measured. Measure them, or store the others with --write."
    for name in now.keys() - stored.keys():
        yield f"{name}: no {what} are stored. Store them with --write."


def changed_launches(stored: dict[str, dict[str, Any]], now: dict[str, Launches]) -> Iterable[str]:
    """Lines for kernels that changed by more than the tolerance and waits that grew, each with its functions."""
    for name in (each for each in now if each in stored):
        for quantity, least, most in (("kernels", 1 - TOLERANCE, 1 + TOLERANCE), ("waits", 0, 1)):
            before, after = stored[name][quantity], getattr(now[name], quantity)
            stored_sum, sum_now = sum(before.values()), sum(after.values())
            if not least * stored_sum <= sum_now <= most * stored_sum:  # also for NaN
                sign, verb = (-1, "fell") if sum_now < stored_sum else (1, "grew")
                yield f"{name}: {quantity} {verb} from {stored_sum:,} to {sum_now:,}, in these functions:"
                changes = {each: sign * (after.get(each, 0) - before.get(each, 0)) for each in before | after}
                for each in sorted(changes, key=changes.__getitem__, reverse=True)[:SHOWN]:
                    if changes[each] > 0:
                        yield f"    {each}: {before.get(each, 0):,} -> {after.get(each, 0):,}"
        if now[name].calls > stored[name]["calls"] * (1 + MORE_CALLS):  # Python's versions differ by less
            yield f"{name}: calls of Python functions grew from {stored[name]['calls']:,} to {now[name].calls:,}."


def grown(stored: dict[str, dict[str, float]], now: dict[str, Cost]) -> Iterable[str]:
    """A line for everything that grew by the tolerance, and for FLOPs that fell by it."""
    for name in (each for each in now if each in stored):
        for quantity in QUANTITIES:
            before, after = stored[name][quantity], getattr(now[name], quantity)
            is_less = quantity == "flops" and after <= before * (1 - TOLERANCE)
            if is_less or not after < before * (1 + TOLERANCE):  # also for a stored NaN
                yield f"{name}: {quantity} changed by {after / before - 1:+.1%}, from {before:,} to {after:,}."


def main(
    arguments: list[str] | None = None,
    measured: Callable[[str], Cost] = measure,
    counted: Callable[[str], Launches] = launches,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store what is measured")
    parser.add_argument("--launches", action="store_true", help="count kernels and waits alone")
    parser.add_argument("--stored", type=Path, default=STORED, help="the JSON file")
    options = parser.parse_args(arguments)
    if options.launches and not is_possible():
        parser.error(f"--launches: {NOT_COUNTED} Leave out --launches to measure FLOPs and peak memory.")
    stored = json.loads(options.stored.read_text(encoding="utf-8")) if options.stored.exists() else {}
    known_costs, known_starts = stored.get("methods", {}), stored.get("launches", {})
    torch.set_num_threads(1)  # the buffers of fused attention grow with the threads
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    # First, since PyTorch starts the threads of a device's backward passes once, before its first one of any device.
    starts = all_launches(counted, known_starts)
    costs = {} if options.launches else all_costs(measured, known_costs)
    if options.write:
        found = {"card": machine(torch.device("cpu"))}
        found["methods"] = {name: asdict(cost) for name, cost in costs.items()} or known_costs
        found["launches"] = {name: asdict(counts) for name, counts in starts.items()} or known_starts
        options.stored.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return 0
    problems, passed = list[str](), list[str]()
    if options.launches:
        passed += ["FLOPs and peak memory were not compared."]
    else:
        problems += [*unmatched(known_costs, costs, "costs"), *grown(known_costs, costs)]
        passed += [f"FLOPs did not change by {TOLERANCE:.0%}, and peak memory did not grow by it."]
    if starts:
        problems += [*unmatched(known_starts, starts, "kernels"), *changed_launches(known_starts, starts)]
        passed += [f"Kernels did not change by more than {TOLERANCE:.0%}, and neither waits nor host work were added."]
    else:
        passed += ["Kernels and waits were not compared."]
    for name in starts.keys() & known_starts.keys():
        before, after = sum(known_starts[name]["waits"].values()), sum(starts[name].waits.values())
        if after < before:
            print(f"{name}: waits fell from {before:,} to {after:,}. If that is meant, store it with --write.")
    print("\n".join(problems or passed))
    return 1 if problems else 0


def all_launches(counted: Callable[[str], Launches], stored: dict[str, dict[str, Any]]) -> dict[str, Launches]:
    """The kernels and waits of every run, which are also printed; empty where they cannot be counted."""
    if not is_possible():
        print(NOT_COUNTED)
        return {}
    print(f"{'one step':22} {'kernels':>9} {'':>7} {'waits':>9} {'':>7} {'calls':>9}")
    found = {}
    for name in RUNS:
        found[name] = counted(name)
        columns = []
        for quantity in ("kernels", "waits"):
            after, before = sum(getattr(found[name], quantity).values()), stored.get(name, {}).get(quantity)
            columns += [f"{after:9,}", f"{'' if before is None else f'{after - sum(before.values()):+,}':>7}"]
        print(f"{name:22} {' '.join(columns)} {found[name].calls:9,}", flush=True)
    return found


def all_costs(measured: Callable[[str], Cost], stored: dict[str, dict[str, float]]) -> dict[str, Cost]:
    """The cost of every method, which are also printed."""
    now = {}
    print(f"{'one step':16} {'GFLOPs':>9} {'':>7} {'peak MiB':>9} {'':>7} {'seconds':>8}")
    for name in METHODS:
        now[name] = cost = measured(name)
        before = stored.get(name)
        of_flops, of_peak = (
            f"{getattr(cost, quantity) / before[quantity] - 1:+.1%}" if before else "" for quantity in QUANTITIES
        )
        sizes = f"{cost.flops / 1e9:9.3f} {of_flops:>7} {cost.peak_bytes / 2**20:9.1f} {of_peak:>7}"
        print(f"{name:16} {sizes} {cost.seconds:8.2f}", flush=True)
    return now


if __name__ == "__main__":
    sys.exit(main())
