"""Rollouts, loss and gradients of a group of full completions: the prompt computed once, beside n copies of it.

    ebft fetch smollm2-135m
    python -m benchmarks.shared_prompt [--preset smollm2] [--dtype bfloat16] [--shapes 0] [--cpu-time]

In float32, the padded rows of the first shape need more than 15 GiB with SmolLM2; in bfloat16, half of that.

A micro-batch is one group: n completions of one prompt, and its reference in the cross-entropy. Both sides are the same
trainer in one process, with `shared_prefix` true and false, that is TRL's rows and transformers' generate(); they take
turns, and each has its fastest round. In the last shape, the completions have unequal lengths, as sampled ones do.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from benchmarks.measuring import RESULTS, Clock, in_turn, machine, parser_of, quiet_folder, store, with_peak_memory
from benchmarks.presets import Preset, build_model, find_preset, train_tokenizer
from benchmarks.train_overhead import write_texts
from ebft import EBFTConfig, EBFTTrainer
from ebft.models.pretrained import pretrained_tokenizer
from ebft.structured.rollouts.local import HFBackend

SIDES = {"shared prompt": True, "TRL's rows": False}
# (prompt, longest completion, shortest completion, completions), in tokens.
SHAPES = [(512, 128, 128, 8), (64, 256, 256, 8), (256, 256, 16, 8)]
CE_COEF = 0.03
LORA_RANK = 16


def make_trainer(preset: Preset, model: Any, samples: int, shared: bool, folder: Path) -> EBFTTrainer:
    """A trainer whose micro-batch is one group."""
    args = EBFTConfig(
        output_dir=str(folder),
        num_generations=samples,
        per_device_train_batch_size=samples,
        shared_prefix=shared,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        ce_coef=CE_COEF,
        report_to="none",
    )
    rows = Dataset.from_list([{"prompt": "a", "ground_truth": "b"}])
    trainer = EBFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer_of(preset, folder))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def tokenizer_of(preset: Preset, folder: Path) -> Any:
    """The model's own tokenizer, or for a random model a small one; the rows that are timed are random tokens."""
    if preset.weights is not None:
        return pretrained_tokenizer(preset.weights)
    return train_tokenizer(write_texts(folder, ["text"]), preset.shape["vocab_size"])


def group(vocabulary: int, prompt: int, longest: int, shortest: int, samples: int) -> dict[str, Tensor]:
    """The inputs of TRL's loss for one group of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = lambda *size: torch.randint(3, vocabulary, size, generator=generator)
    lengths = torch.linspace(shortest, longest, samples).round().long()
    mask = (torch.arange(longest) < lengths[:, None]).long()
    first = torch.zeros(samples, longest, dtype=torch.long)
    first[0] = 1
    return {
        "prompt_ids": ids(1, prompt).expand(samples, -1).contiguous(),
        "prompt_mask": torch.ones(samples, prompt, dtype=torch.long),
        "completion_ids": ids(samples, longest),
        "completion_mask": mask,
        "advantages": torch.randn(samples, generator=generator),
        "num_items_in_batch": mask.sum(),
        "reference_ids": ids(1, longest).expand(samples, -1).contiguous(),
        "reference_mask": first,
        "reference_tokens": first.sum(),
    }


def measure(preset: Preset, dtype: str, shape: tuple[int, ...], repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of both sides, and the relative difference of their gradients."""
    model = build_model(preset, getattr(torch, dtype), positions=shape[0] + shape[1])
    inputs = group(preset.shape["vocab_size"], *shape)
    trainers = {
        name: make_trainer(preset, copy.deepcopy(model), shape[3], shared, folder) for name, shared in SIDES.items()
    }
    gradients, memory = {}, {}
    for name, trainer in trainers.items():
        trainer._buffered_inputs = [inputs]  # what a generation step leaves for the loss
        step(trainer, inputs)  # the first compares both ways
        memory[name] = with_peak_memory(lambda trainer=trainer: step(trainer, inputs), torch.device("cpu"))[1]
        gradients[name] = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    seconds, rollouts = (
        in_turn({name: partial(run, each, inputs) for name, each in trainers.items()}, repeats, torch.device("cpu"))
        for run in (step, roll_out)
    )
    ours, theirs = SIDES
    return {
        "shape": dict(zip(("prompt", "longest", "shortest", "completions"), shape)),
        "seconds": {name: min(values) for name, values in seconds.items()},
        "peak_mib": memory,
        "times_faster": min(seconds[theirs]) / min(seconds[ours]),
        "rollout_seconds": {name: min(values) for name, values in rollouts.items()},
        "rollouts_times_faster": min(rollouts[theirs]) / min(rollouts[ours]),
        "of_memory": None if memory[ours] is None else memory[ours] / memory[theirs],
        "gradient_difference": ((gradients[ours] - gradients[theirs]).norm() / gradients[theirs].norm()).item(),
    }


def step(trainer: EBFTTrainer, inputs: dict[str, Tensor]) -> None:
    """Loss and gradients of one micro-batch."""
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, inputs).backward()


def roll_out(trainer: EBFTTrainer, inputs: dict[str, Tensor]) -> None:
    """Sample completions of the same lengths; no token ends them."""
    sampling = replace(trainer.generation.sampling, end_ids=frozenset())
    backend = HFBackend(trainer, sampling, trainer.processing_class.pad_token_id)
    backend.generate(inputs["prompt_ids"].tolist(), inputs["completion_mask"].sum(1).tolist())


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, repeats=3, cpu_time=True)
    add = parser.add_argument
    add("--preset", choices=["7m", "smollm2"], default="smollm2")
    add("--lora", action="store_true", help=f"LoRA of rank {LORA_RANK} instead of full fine-tuning")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights, and of the computation")
    add("--shapes", type=int, nargs="+", choices=range(len(SHAPES)), default=list(range(len(SHAPES))))
    plan = parser.parse_args(arguments)
    if plan.cpu_time:
        Clock.count_cpu_seconds()
    preset = find_preset(plan.preset, on_cuda=False)
    preset = replace(preset, lora_rank=LORA_RANK) if plan.lora else preset
    preset = preset.shrunken() if plan.tiny else preset
    shapes = [(24, 6, 3, 2)] if plan.tiny else [SHAPES[number] for number in plan.shapes]
    with quiet_folder() as folder:
        found = [measure(preset, plan.dtype, shape, plan.repeats, folder) for shape in shapes]
    for row in found:
        print(
            f"{row['shape']}: loss {row['times_faster']:.2f} x as fast, {row['of_memory'] or float('nan'):.2f} of the "
            f"memory, gradients differ by {row['gradient_difference']:.1e}; rollouts "
            f"{row['rollouts_times_faster']:.2f} x as fast"
        )
    card = {"model": preset.description, "dtype": plan.dtype, "rounds": plan.repeats}
    results = {"card": {**card, "ce_coef": CE_COEF, **machine(torch.device("cpu"))}, "shapes": found}
    store(plan.output or RESULTS / f"shared-prompt-{preset.name}{'-lora' if plan.lora else ''}-cpu.json", results)


if __name__ == "__main__":
    main()
