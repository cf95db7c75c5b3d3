"""How well async_prefetch hides generation: a structured step beside the longer of generating and training.

    python -m benchmarks.overlap --vllm-python PYTHON    # the interpreter of an environment with vLLM

A real vLLM serves the small model of the other benchmark, and a proxy delays each of its answers until generating takes
as long as training, where a step that does one after the other wastes most. Synchronous and asynchronous steps then
run in one process, on one core, the server on another. Generating is what a synchronous step waits for its rollouts,
training is the rest of it, and an asynchronous step should take little more than the longer of the two.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.measuring import RESULTS, machine, parser_of, quiet_folder, rounded, store
from benchmarks.presets import build_model, find_preset, train_tokenizer
from benchmarks.train_overhead import library, write_texts
from ebft import AsyncEBFTConfig, AsyncEBFTTrainer, EBFTConfig, EBFTTrainer
from ebft.run.config.schema import RunConfig
from ebft.serving.command import server_command
from ebft.serving.server import VLLMServer
from tests.structured.proxy import Proxy

PROMPT, REFERENCE = 160, 32  # characters
POSITIONS = 256
WARM_UP = 2  # steps that are left out
BOUND = 1.2  # what an asynchronous step may take of the longer part
OPTIONS = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 24,
    "adaptive_max_tokens": False,
    "temperature": 0.7,
}
TRAINING = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "127.0.0.1", "vllm_server_timeout": 60}
TRAINING |= {"logging_steps": 1, "learning_rate": 1e-4, "gradient_checkpointing": False, "save_strategy": "no"}
TRAINING |= {"report_to": "none", "disable_tqdm": True}


class Steps(TrainerCallback):
    """The time at the start of every step."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.starts.append(time.perf_counter())


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, output=RESULTS / "overlap-cpu.json")
    parser.add_argument("--vllm-python", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each kind")
    plan = parser.parse_args(arguments)
    preset = find_preset("7m", on_cuda=False)
    if plan.tiny:  # vLLM's attention on CPU takes no narrower heads than 32
        small = preset.shrunken()
        preset = replace(small, shape={**small.shape, "num_attention_heads": 2, "num_key_value_heads": 1})
    torch.set_num_threads(1)
    with quiet_folder() as folder:
        base, rows = make_base(preset, folder)
        card = {
            "step": "structured EBFT, 16 completions of 24 tokens for 4 prompts, LoRA of rank 8",
            "model": replace(preset, lora_rank=8).description,
            "options": OPTIONS,
            **machine(torch.device("cpu")),
        }
        with serving(base, plan.vllm_python, folder) as port, Proxy(port) as proxy:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {0})  # so that the server has the other cores to itself
            results = measure(base, rows, proxy, plan.steps, folder)
    results = rounded({"card": card, **results})
    print("\n".join(f"{name:>14}  {value}" for name, value in card.items()))
    for name in ("delay", "generate", "train", "sync_step", "async_step"):
        print(f"{name:>14}  {results[name]:.3f} s")
    print(f"async step / max(generate, train): {results['async_of_max']:.2f} (at most {BOUND})")
    print(f"sync step / async step: {results['sync_of_async']:.2f}")
    print(json.dumps(results))
    store(plan.output, results)


def measure(base: Path, rows: Dataset, proxy: Proxy, steps: int, folder: Path) -> dict[str, Any]:
    """Medians over steps, in seconds, and their ratios."""
    trial = run(EBFTTrainer, EBFTConfig, base, rows, proxy.port, steps, folder)
    proxy.delay = max(0.0, trial["train"] - trial["generate"])
    sync = run(EBFTTrainer, EBFTConfig, base, rows, proxy.port, steps, folder)
    ahead = run(AsyncEBFTTrainer, AsyncEBFTConfig, base, rows, proxy.port, steps, folder)
    found = {"delay": proxy.delay, "generate": sync["generate"], "train": sync["train"], "sync_step": sync["step"]}
    found |= {"async_step": ahead["step"], "async_waits": ahead["generate"]}
    found["async_of_max"] = ahead["step"] / max(sync["generate"], sync["train"])
    return found | {"sync_of_async": sync["step"] / ahead["step"], "steps": steps}


def run(
    trainer_class: type, config_class: type, base: Path, rows: Dataset, port: int, steps: int, folder: Path
) -> dict[str, float]:
    """Train `steps` steps after the warm-up; medians of a whole step, of its wait for rollouts, and of the rest."""
    args = config_class(
        output_dir=str(folder / "out"),
        vllm_server_port=port,
        max_steps=steps + WARM_UP + 1,
        **OPTIONS,
        **TRAINING,
    )
    torch.manual_seed(0)
    clock = Steps()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = trainer_class(
            AutoModelForCausalLM.from_pretrained(base),
            args,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        trainer.train()
    trainer.generation.server.close()
    waits = [entry["rollouts/wait_s"] for entry in trainer.state.log_history if "loss" in entry][WARM_UP:]
    whole = [after - before for before, after in zip(clock.starts, clock.starts[1:])][WARM_UP:]
    rest = [step - wait for step, wait in zip(whole, waits)]
    return {"step": median(whole), "generate": median(waits), "train": median(rest)}


def make_base(preset: Any, folder: Path) -> tuple[Path, Dataset]:
    """The preset's random model with a tokenizer, and rows of text from the standard library."""
    texts = library()
    train_tokenizer(write_texts(folder, texts), preset.shape["vocab_size"]).save_pretrained(folder / "base")
    build_model(replace(preset, lora_rank=None), torch.float32, POSITIONS).save_pretrained(folder / "base")
    tiles = [text[1000 : 1000 + PROMPT + REFERENCE] for text in texts if len(text) > 1000 + PROMPT + REFERENCE]
    rows = [{"prompt": tile[:PROMPT], "ground_truth": tile[PROMPT:]} for tile in tiles]
    return folder / "base", Dataset.from_list([row for row in rows if row["ground_truth"].strip()])


@contextlib.contextmanager
def serving(base: Path, python: str, folder: Path) -> Any:
    """A vLLM server for `base` on the last core; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = RunConfig.from_dict(
        {
            "base_model": str(base),
            "rl": "ebft",
            "trl": {"use_vllm": True, "async_prefetch": True},
            "vllm": {"port": port, "max_model_len": POSITIONS},
            "datasets": [{"path": "unused", "type": "ebft_opencode.transform"}],
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_target_linear": True,
        }
    )
    last = str((os.cpu_count() or 1) - 1)
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": last}
    with VLLMServer(server_command(config.server_settings, python, gpus=0), folder / "vllm.log", environment) as server:
        server.wait_until_healthy()
        yield port


if __name__ == "__main__":
    main()
