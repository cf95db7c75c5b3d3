"""One strided EBFT step, by phase: what it takes, and what the matrix products in it would take alone.

    .venv/bin/python benchmarks/strided_step.py [--lengths 256 512 1024] [--dtype float32] [--output FILE.json]

The model is a random Llama of 7M parameters (hidden 256, intermediate 704, 8 layers, 4/2 heads, vocabulary 4096),
one document, n = 4, stride = context = rollout = 8, full fine-tuning. Prints a card, a table and one JSON line.
"""

import argparse
import json
import platform
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from ebft.models.causal_lm import evaluating
from ebft.monitor.throughput import peak_memory_gib
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from ebft.strided.embed import embed_blocks
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.rollout import sample_rollouts

BLOCKS = {
    "stride": 8,
    "context_length": 8,
    "generate_max_len": 8,
    "n_samples_per_prompt": 4,
}


def build_trainer(dtype: torch.dtype, longest: int) -> StridedEBFTTrainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
    )
    args = StridedEBFTConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available(), report_to=[], use_whitening=True, **BLOCKS
    )
    return StridedEBFTTrainer(model=LlamaForCausalLM(config).to(dtype), args=args)


def gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product of the model's dtype, measured here and now."""
    a, b = (torch.randn(2048, 2048, device=device).to(dtype) for _ in range(2))
    seconds = median(timed(lambda: a @ b, device) for _ in range(7))
    return 2 * 2048**3 / seconds


def timed(run, device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_round(trainer, inputs, documents, layout, device) -> dict[str, float]:
    """Seconds of each phase, once."""
    model, kept = trainer.model, {}

    def sample():
        kept["tokens"], _ = sample_rollouts(trainer._causal_lm, documents, layout, temperature=0.6)

    def embed():
        embed_blocks(trainer.feature_network, documents, layout, kept["tokens"])

    def step():
        kept["loss"] = trainer.compute_loss(model, inputs)

    with evaluating(model):
        seconds = {"rollout": timed(sample, device), "features": timed(embed, device)}
    seconds["loss"] = timed(step, device)
    seconds["backward"] = timed(lambda: kept["loss"].backward(), device)
    model.zero_grad()
    return seconds


def measure(trainer: StridedEBFTTrainer, length: int, repeats: int) -> dict[str, float]:
    """Median seconds of the whole step, of its no-gradient phases alone, and of forward and backward."""
    model = trainer.model
    device = next(model.parameters()).device
    inputs = {"input_ids": torch.randint(3, 4096, (1, length), generator=torch.Generator().manual_seed(length))}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    documents = Documents.from_inputs(inputs)
    layout = StridedLayout.place(documents, **BLOCKS)
    rounds = [one_round(trainer, inputs, documents, layout, device) for _ in range(repeats + 1)][
        1:
    ]  # the first warms up
    result = {name: median(row[name] for row in rounds) for name in rounds[0]}
    result["forward"] = max(result["loss"] - result["rollout"] - result["features"], 0.0)
    result["step"] = result.pop("loss") + result["backward"]
    with FlopCounterMode(display=False) as counter:
        trainer.compute_loss(model, inputs).backward()
    model.zero_grad()
    return {"length": length, **result, "gflop": counter.get_total_flops() / 1e9, "peak_gib": peak_memory_gib()}


def card(dtype: str, device: torch.device) -> dict[str, str | int]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "model": "Llama 7M (256 x 8, vocabulary 4096)",
        "dtype": dtype,
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    dtype = getattr(torch, arguments.dtype)
    trainer = build_trainer(dtype, max(arguments.lengths))
    device = next(trainer.model.parameters()).device
    facts = card(arguments.dtype, device)
    for name, value in facts.items():
        print(f"{name:>14}  {value}")
    rate = gemm_rate(dtype, device)
    print(f"{'GEMM':>14}  {rate / 1e9:.0f} GFLOP/s\n")
    columns = ["length", "rollout", "features", "forward", "backward", "step", "floor", "x floor", "peak_gib"]
    print("".join(f"{name:>10}" for name in columns))
    results = []
    for length in arguments.lengths:
        row = measure(trainer, length, arguments.repeats)
        row["floor"] = row["gflop"] * 1e9 / rate
        row["x floor"] = row["step"] / row["floor"]
        results.append(row)
        print("".join(f"{row[name]:>10}" if name == "length" else f"{row[name]:>10.2f}" for name in columns))
    report = {"card": facts, "gemm_gflops": rate / 1e9, "results": results}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
