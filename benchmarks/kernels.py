"""Kernels that a step of EBFT starts on an accelerator, by phase and by line, without one.

    python -m benchmarks.kernels                            # strided, one document of 512, 1024 and 2048 tokens
    python -m benchmarks.kernels --lengths 1024 --lines 20  # also the lines that start most
    python -m benchmarks.kernels --host                     # what the processor takes to start them

Trains a small random Llama of 16 layers with `ebft.train` on the device of tests/devices/pretend.py, on which the code
takes the branches that a GPU takes (separate passes for sampling and training, a fused optimizer). The second step is
counted, from the end of the first to its own end. Kernels depend on the number of layers, not on their width; each of
them costs time to launch from Python, however small it is. Recorded passes (`ebft.cuda_graphs`) are one kernel.

`--host` trains on the CPU on the same branches with documents of 64 tokens, whose arithmetic takes little, and prints
the calls of Python functions in a step, the time of the fastest of seven steps, and its ratio to 10,000 additions of
eight numbers. A recorded pass is computed once and repeated for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import ebft
import ebft.prefix.cpu
import ebft.run.trainer
import ebft.strided.trainer
from ebft import FeatureMatchingReward
from ebft.prefix import gpu
from ebft.structured.grpo import RolloutGRPOTrainer
from ebft.structured.rollouts.local import SharedPromptSampler
from tests.devices.pretend import Counts, pretend_device, record, register
from tests.devices.recording import PretendRecording

LAYERS, WORDS, ANSWER = 16, 510, 32
STEPS = {"max_steps": 2, "micro_batch_size": 1, "learning_rate": 1e-4, "save_strategy": "no", "torch_dtype": "float32"}
STEPS |= {"log_rollouts": "none"}  # as most steps of a long run, which store no rollouts
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
BLOCKS = {"stride": 8, "context_length": 8, "generate_max_len": 8, "n_samples_per_prompt": 4}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", **BLOCKS}}
COMPLETIONS = {"num_generations": 4, "max_completion_length": 16, "temperature": 1.0}
STRUCTURED = {"rl": "ebft", "ebft": {"mode": "structured"}, "trl": COMPLETIONS, "micro_batch_size": 4}
RUNS = {
    "strided": STRIDED,
    "strided, 8 rows": STRIDED | {"micro_batch_size": 8},
    "strided LoRA": STRIDED | LORA,
    "structured": STRUCTURED,
    "structured LoRA": STRUCTURED | LORA,
}
for _name in ("strided", "strided LoRA", "structured"):
    RUNS[f"{_name}, recorded"] = RUNS[_name] | {"ebft": RUNS[_name]["ebft"] | {"cuda_graphs": True}}
# Functions that are a phase of the step, by where they are looked up; all else is "other".
PHASES: dict[str, list[tuple[Any, str]]] = {
    "sample": [(ebft.strided.trainer, "sample_rollouts"), (SharedPromptSampler, "__call__")],
    "embed": [(ebft.strided.trainer, "embed_blocks"), (FeatureMatchingReward, "__call__")],
    "log-probs": [(ebft.strided.trainer, "score"), (RolloutGRPOTrainer, "compute_loss")],
    "backward": [(Accelerator, "backward")],
    "optimizer": [(AcceleratedOptimizer, "step"), (Accelerator, "clip_grad_norm_")],
}


class CountStep(TrainerCallback):
    """What the second step of a training run does, by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, Counts] = {}
        self._counting = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting = state.global_step == 1
        if self._counting:
            self._before = self._all.copy()
        elif state.global_step == 2:
            self.phases["other"] = self._all.since(self._before)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, runs are counted."""
        with ExitStack() as during:
            self._all = during.enter_context(record())
            during.enter_context(patch("ebft.run.trainer.ProgressBar", self))
            for phase, functions in PHASES.items():
                self.phases[phase] = Counts()
                for owner, name in functions:
                    during.enter_context(patch.object(owner, name, self._watched(getattr(owner, name), phase)))
            yield

    def _watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with record() as found:
                result = function(*args, **kwargs)
            if self._counting:
                self.phases[phase].add(found)
            return result

        return watched


@contextmanager
def silence() -> Iterator[None]:
    """Inside the block, nothing is printed."""
    output = io.StringIO()
    quiet = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
    with quiet[0], quiet[1], warnings.catch_warnings(action="ignore"):
        yield


def counts_of_run(name: str, length: int, **changes: Any) -> dict[str, Counts]:
    """Train the run `name` of RUNS with documents, or prompts with references, of `length` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        return counts_of_step({**STEPS, **inputs_of_run(Path(folder), length, RUNS[name]), **RUNS[name], **changes})


def counts_of_step(keys: dict[str, Any]) -> dict[str, Counts]:
    """The counts by phase of the second step of a run, after `register()` before any backward pass."""
    step = CountStep()
    with ExitStack() as during:
        during.enter_context(pretend_device())
        during.enter_context(step.watching())
        during.enter_context(patch.object(gpu, "can_record", lambda device: True))
        during.enter_context(patch.object(gpu, "Recording", PretendRecording))
        during.enter_context(silence())
        ebft.train(ebft.RunConfig.from_dict(keys))
    return step.phases


class Host(TrainerCallback):
    """Seconds of all steps but the first and the last, and the calls of Python functions in the last one."""

    def __init__(self, steps: int) -> None:
        self.seconds: list[float] = []
        self.calls, self._steps = 0, steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._steps - 1:
            sys.setprofile(self._count)
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        if 1 < state.global_step < self._steps:
            self.seconds.append(time.perf_counter() - self._start)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


def for_nothing(function: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
    """A recording that is computed once."""
    result = function(*inputs)
    return lambda *inputs: result


def host_work(name: str, steps: int = 9) -> tuple[int, float, float]:
    """Calls of Python functions in a step of a run, its seconds, and their ratio to the yardstick's."""
    host, run, small = Host(steps), RUNS[name], torch.ones(8)
    changes = [(gpu, "is_accelerator", lambda device: True), (gpu, "_memory", lambda device: 2**33)]
    changes += [(gpu, "can_record", lambda device: True), (gpu, "Recording", for_nothing)]
    changes += [(ebft.run.trainer, "ProgressBar", host), (ebft.prefix.cpu, "_onednn_is_faster", lambda: False)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as during:
        keys = {**STEPS, **inputs_of_run(Path(folder), 64, run), **run, "max_steps": steps}
        if run["ebft"]["mode"] == "strided":
            keys["ebft"] = {**keys["ebft"], "single_pass": False, "merge_rollouts": False}
        for change in changes:
            during.enter_context(patch.object(*change))
        during.enter_context(silence())
        ebft.train(ebft.RunConfig.from_dict(keys))
    yardstick = min(timeit.repeat(lambda: small + small, number=10_000, repeat=9))
    return host.calls, min(host.seconds), min(host.seconds) / yardstick


def inputs_of_run(folder: Path, length: int, run: dict[str, Any]) -> dict[str, Any]:
    """`write_inputs` with a model of `LAYERS` layers, and documents of `length` tokens."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 4096, "bos_token_id": None}
    words = [[f"w{(row * 7919 + n * n) % WORDS}" for n in range(length)] for row in range(16)]
    parts = [{"text": row, "input": row[:-ANSWER], "output": row[-ANSWER:]} for row in words]
    rows = [{name: " ".join(part) for name, part in row.items()} for row in parts]
    transform = "ebft_pretrain" if run["ebft"]["mode"] == "strided" else "ebft_opencode"
    keys = write_inputs(folder, f"{transform}.transform", rows, WORDS, shape, after=" ")
    return keys | {"sequence_len": length + 8}


def write_inputs(
    folder: Path, transform: str, rows: list[dict[str, Any]], count: int, shape: dict[str, Any], after: str
) -> dict[str, Any]:
    """A Llama of a shape, a tokenizer of `count` words and rows in `folder`; the keys of a config that name them."""
    words = {word: index for index, word in enumerate(["<end>", "<pad>", *(f"w{n}" for n in range(count))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = f"{{% for message in messages %}}{{{{ message['content'] + '{after}' }}}}{{% endfor %}}"
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(words), eos_token_id=0, pad_token_id=1, **shape)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "base_model": str(folder / "base"),
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": transform}],
        "output_dir": str(folder / "out"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="tokens of the document")
    parser.add_argument("--runs", choices=RUNS, nargs="+", default=["strided", "strided LoRA"], help="what is trained")
    parser.add_argument("--lines", type=int, default=0, help="print the lines that start most kernels, by phase")
    parser.add_argument("--dtype", default="float32", help="torch_dtype of the model")
    parser.add_argument("--host", action="store_true", help="measure what the processor does instead")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.host:
        print(f"{'host work of a step':22} {'calls':>8} {'seconds':>8} {'ratio':>6}")
        for name in options.runs:
            calls, seconds, ratio = host_work(name)
            print(f"{name:22} {calls:8,} {seconds:8.3f} {ratio:6.1f}", flush=True)
        return 0
    register()
    print(f"{'kernels of a step':22} {'tokens':>6} {'step':>7}", *(f"{name:>9}" for name in (*PHASES, "other")))
    for name in options.runs:
        for length in options.lengths:
            phases = counts_of_run(name, length, torch_dtype=options.dtype)
            kernels = [sum(counts.kernels.values()) for counts in phases.values()]
            print(f"{name:22} {length:6} {sum(kernels):7,} " + " ".join(f"{count:9,}" for count in kernels), flush=True)
            for phase, counts in phases.items():
                for line, count in counts.kernels.most_common(options.lines):
                    print(f"{phase:>25} {count:7,} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
