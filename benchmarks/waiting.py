"""What users wait for besides steps, as whole processes: preparing rows, starting, evaluating and merging.

    python -m benchmarks.waiting [--rows 100000] [--repeats 3] > benchmarks/results/waiting-cpu.json

Chats of four turns for SmolLM2-135M (downloaded once), of which TRL's SFTTrainer prepares the same rows. The start is a
run of one step on 64 rows, with everything before and after it. Sides run in turn; the fastest time of each counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measuring import machine
from ebft.tools.fetch import fetch_model

TRL = """
import sys; from datasets import load_dataset; from peft import LoraConfig; from trl import SFTConfig, SFTTrainer
model, rows, steps, output = sys.argv[1:]
args = SFTConfig(output, max_length=512, max_steps=int(steps), per_device_train_batch_size=2, use_cpu=True, bf16=False)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
data = load_dataset("json", data_files=rows, split="train")
trainer = SFTTrainer(model, args, train_dataset=data, peft_config=lora)
if int(steps) > 0: trainer.train(); trainer.save_model()
"""


def write_chats(count: int, path: Path) -> Path:
    """A file of chats of four turns, with 40 words in each answer."""
    text = lambda start, size: " ".join(f"word{(start + n) * 7919 % 997}" for n in range(size))
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            turns = [("user", text(row, 12)), ("assistant", text(3 * row, 40))] * 2
            file.write(json.dumps({"messages": [{"role": role, "content": words} for role, words in turns]}) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    options, found = parser.parse_args(), dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), fetch_model("smollm2-135m")
        many, few = (write_chats(count, folder / f"{count}.jsonl") for count in (options.rows, 64))
        config, rows = folder / "sft.yaml", {"path": str(few), "type": "chat_template"}
        keys = {"base_model": str(model), "sequence_len": 512, "micro_batch_size": 2, "max_steps": 1, "adapter": "lora"}
        keys |= {"lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "output_dir": str(folder / "ours")}
        config.write_text(json.dumps(keys | {"datasets": [rows], "test_datasets": [rows]}))
        ebft, prepared = [sys.executable, "-m", "ebft"], f"dataset_prepared_path={folder / 'prepared'}"
        commands = {
            "preprocess": [*ebft, "preprocess", config, f"datasets.0.path={many}", prepared],
            "preprocess, TRL": [sys.executable, "-c", TRL, model, many, 0, folder / "trl"],
            "one step": [*ebft, "train", config, "test_datasets="],
            "one step, TRL": [sys.executable, "-c", TRL, model, few, 1, folder / "trl"],
            "evaluate": [*ebft, "evaluate", config, "evaluation.documents=8", "evaluation.max_new_tokens=16"],
            "merge": [*ebft, "merge-lora", config, "--output", folder / "merged"],
        }
        for what, command in list(commands.items()) * options.repeats:
            for made in ("prepared", "trl", "merged", *(["ours"] if what == "one step" else [])):
                shutil.rmtree(folder / made, ignore_errors=True)
            started = time.perf_counter()
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            found[what] = min(found.get(what, float("inf")), time.perf_counter() - started)
    print(json.dumps({"card": machine(torch.device("cpu")), "rows": options.rows, "seconds": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
