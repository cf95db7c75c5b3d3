"""What users wait for besides steps, as whole processes: preparing rows, starting, evaluating and merging.

    python -m benchmarks.waiting [--rows 100000] [--repeats 3] [--output FILE.json]

Chats of four turns for SmolLM2-135M (`ebft fetch smollm2-135m`), of which TRL's SFTTrainer prepares the same rows. The
start is a run of one step on 64 rows, with everything before and after it; `nothing` is what Python takes to import
what TRL imports. Sides run in turn, and the fastest time of each is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import machine
from ebft.tools.fetch import fetch_model

TRL = """
import sys
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
model, rows, steps, output = sys.argv[1:]
args = SFTConfig(output, max_length=512, max_steps=int(steps), per_device_train_batch_size=2, use_cpu=True, bf16=False,
                 report_to=[], assistant_only_loss=False, logging_steps=1)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(AutoModelForCausalLM.from_pretrained(model), args, train_dataset=load_dataset("json",
                     data_files=rows, split="train"), processing_class=AutoTokenizer.from_pretrained(model),
                     peft_config=lora)
if int(steps) > 0:
    trainer.train()
    trainer.save_model()
"""
PEFT = """
import sys
from peft import AutoPeftModelForCausalLM
AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[2])
"""


def chats(count: int, path: Path) -> Path:
    """A file of chats of four turns, with about 40 words in each answer."""
    words = [f"word{number * 7919 % 997}" for number in range(997)]
    turn = lambda role, start, size: {"role": role, "content": " ".join(words[(start + n) % 997] for n in range(size))}
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            pairs = [(turn("user", row, 12), turn("assistant", 3 * row + at, 40)) for at in range(2)]
            file.write(json.dumps({"messages": [each for pair in pairs for each in pair]}) + "\n")
    return path


def seconds(command: list[Any]) -> float:
    """Seconds of a command, which must succeed."""
    started = time.perf_counter()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}\n{done.stderr[-3000:]}")
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    model, found = fetch_model("smollm2-135m"), dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many, few = chats(options.rows, folder / "many.jsonl"), chats(64, folder / "few.jsonl")
        config = folder / "sft.yaml"
        keys = {"base_model": str(model), "sequence_len": 512, "micro_batch_size": 2, "max_steps": 1, "adapter": "lora"}
        keys |= {"lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "output_dir": str(folder / "ours")}
        config.write_text(json.dumps(keys | {"datasets": [{"path": str(few), "type": "chat_template"}]}))
        ebft, python, adapter = [sys.executable, "-m", "ebft"], [sys.executable, "-c"], folder / "ours"
        of_many = [f"datasets.0.path={many}", "max_steps=", "num_epochs=1"]
        commands = {
            "preprocess": [*ebft, "preprocess", config, *of_many, f"dataset_prepared_path={folder / 'prepared'}"],
            "preprocess, TRL": [*python, TRL, model, many, 0, folder / "trl"],
            "one step": [*ebft, "train", config],
            "one step, TRL": [*python, TRL, model, few, 1, folder / "trl"],
            "evaluate": [*ebft, "evaluate", config, "--model", adapter, f"test_datasets=[{{path: {few}, type: chat_template}}]"],
            "merge": [*ebft, "merge-lora", adapter, "--output", folder / "merged"],
            "merge, PEFT": [*python, PEFT, adapter, folder / "peft"],
            "help": [*ebft, "--help"],
            "nothing": [*python, "import trl, transformers, peft, datasets; from trl import SFTTrainer"],
        }
        for _ in range(options.repeats):
            for what, command in commands.items():
                for made in ("prepared", "ours" if what == "one step" else "trl", "merged", "peft"):
                    subprocess.run(["rm", "-rf", folder / made], check=True)
                found[what] = min(found.get(what, float("inf")), seconds(command))
                print(f"{what:16} {found[what]:8.2f} s", flush=True)
    if options.output:
        result = {"card": machine(torch.device("cpu")), "rows": options.rows, "seconds": found}
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
