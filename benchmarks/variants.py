"""Our step in other ways, in turn in one process: what each saves or costs. benchmarks/what-we-tried.md cites it.

    python -m benchmarks.variants [--length 1024] [--repeats 5]

The 7M model of strided_step.py in float32, one document. Also the two ways to attend to a shared prefix, alone:
PyTorch's fused kernel, and two matrix products with a softmax between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.measuring import RESULTS, in_turn, machine, parser_of, quiet_folder, store, timed, with_peak_memory
from benchmarks.presets import Preset, document, find_preset, num_generated
from benchmarks.sides import Side, ours

Variant = Callable[[Side, int], Any]  # a context manager within which a side of a length steps that way


def options(**changes: Any) -> Variant:
    """Other options of the trainer."""

    @contextmanager
    def changed(side: Side, length: int) -> Iterator[None]:
        args = side.trainer.args
        before = {name: getattr(args, name) for name in changes}
        for name, value in changes.items():
            setattr(args, name, value(length) if callable(value) else value)
        yield
        for name, value in before.items():
            setattr(args, name, value)

    return changed


def patched(target: str, value: Any) -> Variant:
    """Something else in the place of a constant or a function."""
    return lambda side, length: patch(f"ebft.prefix.{target}", value)


@contextmanager
def checkpointed(side: Side, length: int) -> Iterator[None]:
    """Layers run again in backward."""
    with options(gradient_checkpointing=True)(side, length):
        side.trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        yield
        side.trainer.model.gradient_checkpointing_disable()


VARIANTS: dict[str, Variant] = {
    "as it is": lambda side, length: nullcontext(),
    "a second forward for the loss": options(single_pass=False),
    "layers recomputed in backward": checkpointed,
    "a quarter of the rollouts at a time": options(rollout_tokens_per_pass=lambda n: num_generated(n) // 4),
    "tiles of 64 rows": patched("attention.passes._ROWS_PER_TILE", {"cpu": 64, "other": 64}),
    "tiles of 1024 rows": patched("attention.passes._ROWS_PER_TILE", {"cpu": 1024, "other": 1024}),
    "documents in tiles too": patched("attention.passes._is_plain", lambda *args: False),
    "logits of 2**20 numbers at a time": patched("logps.LOGITS_PER_CHUNK", {"cpu": 2**20, "other": 2**20}),
}


def measure(side: Side, inputs: dict[str, Tensor], repeats: int) -> list[dict[str, Any]]:
    """Median seconds and peak MiB of every variant, in turn, and the median of its ratio to the first."""
    length = inputs["input_ids"].shape[1]
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    memory: dict[str, float | None] = {}
    for name, variant in VARIANTS.items():
        with variant(side, length):
            memory[name] = with_peak_memory(lambda: side.step(inputs), side.device)[1]
    for _ in range(repeats):
        for name, variant in VARIANTS.items():
            with variant(side, length):
                side.step(inputs)  # memory is taken from the system here
                seconds[name].append(timed(lambda: side.step(inputs), side.device)[1])
    first = seconds["as it is"]
    return [
        {
            "variant": name,
            "seconds": median(found),
            "ratio": median(a / b for a, b in zip(found, first)),
            "peak_mib": memory[name],
        }
        for name, found in seconds.items()
    ]


def packing(side: Side, preset: Preset, repeats: int) -> dict[str, float]:
    """Eight documents of 64 to 512 tokens in one step, and one after the other."""
    documents = [document(preset, 64 * (i + 1), side.device)["input_ids"][0] for i in range(8)]
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    lengths = torch.tensor([len(x) for x in documents], device=side.device)
    together = {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1], device=side.device) < lengths[:, None]}

    def apart() -> None:
        for tokens in documents:
            side.step({"input_ids": tokens[None]})

    seconds = in_turn({"together": lambda: side.step(together), "apart": apart}, repeats + 1, side.device)
    return {name: median(found[1:]) for name, found in seconds.items()}


def prefix_attention(dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """FLOP/s of attending from 504 rows to 512 shared keys, forward and backward, by kernel and by products."""
    query, grad = (torch.randn(1, 2, 504, 64).to(dtype) for _ in range(2))
    key, value = (torch.randn(1, 2, 512, 64).to(dtype) for _ in range(2))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    output, lse = kernel(query, key, value, 0.0, False)

    def products() -> Tensor:
        return (query @ key.mT).float().softmax(-1).to(dtype) @ value

    def products_backward() -> tuple[Tensor, ...]:
        weights = (query @ key.mT).float().softmax(-1)
        grads = torch.ops.aten._softmax_backward_data((grad @ value.mT).float(), weights, -1, torch.float32).to(dtype)
        return grads @ key, grads.mT @ query, weights.to(dtype).mT @ grad

    flop = 4 * query.numel() * 512
    runs = {
        "kernel": (flop, lambda: kernel(query, key, value, 0.0, False)),
        "products": (flop, products),
        "kernel backward": (2.5 * flop, lambda: kernel_backward(grad, query, key, value, output, lse, 0.0, False)),
        "products backward": (2.5 * flop, products_backward),
    }
    cpu = torch.device("cpu")
    seconds = {name: median(timed(run, cpu)[1] for _ in range(20 * repeats)) for name, (_, run) in runs.items()}
    return {"dtype": str(dtype), **{f"{name}, GFLOP/s": runs[name][0] / s / 1e9 for name, s in seconds.items()}}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, repeats=5, output=RESULTS / "variants-7m-cpu.json")
    parser.add_argument("--length", type=int, default=1024)
    plan = parser.parse_args(arguments)
    preset = find_preset("7m", on_cuda=False)
    preset = preset.shrunken() if plan.tiny else preset
    with quiet_folder() as folder:
        side = ours(preset, "float32", max(plan.length, 512), folder)
        inputs = document(preset, plan.length, side.device)
        results = {
            "card": {"model": preset.description, "length": plan.length, **machine(side.device)},
            "variants": measure(side, inputs, plan.repeats),
            "eight documents": packing(side, preset, plan.repeats),
        }
        if side.device.type == "cpu":
            results["prefix attention"] = [prefix_attention(x, plan.repeats) for x in (torch.float32, torch.bfloat16)]
    for row in results["variants"]:
        memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:8.0f} MiB"
        print(f"{row['variant']:<40}{row['seconds']:8.3f} s{row['ratio']:8.2f} x{memory}")
    print(results["eight documents"], *results.get("prefix attention", []), sep="\n")
    store(plan.output, results)


if __name__ == "__main__":
    main()
