"""What 16-bit weights and mixed precision do to a strided step: `python -m benchmarks.precision`.

The same document, rollouts and noise in each precision, with SmolLM2-135M, full fine-tuning and LoRA. Compared with
float32: the mean error of the rollouts' log-probabilities, and the similarity of rewards, advantages and the gradient
of all trained parameters. "rounded logits": the results of the output layer are rounded to bfloat16, as in a plain
model. The last columns are the CPU time of a step, and its ratio to that with rounded logits, in turn; a processor
multiplies in float32 for what a GPU returns in any case.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.measuring import RESULTS, Clock, machine, parser_of, quiet_folder, store, timed
from benchmarks.presets import Preset, document, find_preset
from benchmarks.sides import Side, ours
from ebft.strided.output import StridedOutput
from ebft.strided.rollout import Rollouts

TUNINGS = {"full": None, "LoRA": 16}
# Name -> dtype of the weights, and whether matrix products are in mixed precision.
PRECISIONS = {"float32": ("float32", False), "mixed": ("float32", True), "bfloat16": ("bfloat16", True)}


def logits(are_rounded: bool) -> AbstractContextManager:
    """Inside, the results of the output layer are rounded, or not."""
    return patch("ebft.prefix.logps._HALF", ()) if are_rounded else nullcontext()


def step_on(side: Side, inputs: dict[str, Tensor], tokens: Tensor | None) -> tuple[StridedOutput, Tensor]:
    """The results of a step, and the gradient of all trained parameters; on the rollouts `tokens` if they are given."""
    trainer = side.trainer
    trainer.args.single_pass = False
    known = None if tokens is None else Rollouts(tokens, torch.zeros(tokens.shape), torch.zeros(tokens.shape), None)
    sampling = nullcontext() if known is None else patch.object(trainer, "_sample", lambda *args: known)
    with sampling:
        loss, output = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    loss.backward()
    found = [weight.grad.float().flatten() for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.model.zero_grad(set_to_none=True)
    trainer.args.single_pass = None
    return output, torch.cat(found)


def errors(exact: tuple[StridedOutput, Tensor], found: tuple[StridedOutput, Tensor]) -> dict[str, float]:
    """How far the results and the gradient of a step are from those of the exact one."""
    (theirs, their_gradient), (output, gradient) = exact, found
    pair = torch.stack([theirs.rewards.flatten(), output.rewards.flatten()])
    difference = (output.logps - theirs.logps).abs()
    return {
        "logps_nats": difference.mean().item(),
        "logps_nats_largest": difference.max().item(),
        "rewards_correlation": pair.corrcoef()[0, 1].item(),
        "advantages_cosine": cosine_similarity(theirs.advantages.flatten(), output.advantages.flatten(), 0).item(),
        "gradient_cosine": cosine_similarity(their_gradient.double(), gradient.double(), 0).item(),
    }


def measure(preset: Preset, length: int, repeats: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each precision, with and without rounded logits."""
    inputs, exact, tokens = document(preset, length, torch.device("cpu")), None, None
    for name, (dtype, is_mixed) in PRECISIONS.items():
        side = ours(preset, dtype, length, folder, is_mixed=is_mixed)
        rows: dict[bool, dict[str, Any]] = {}
        for are_rounded in (False, True) if is_mixed else (False,):
            with logits(are_rounded):
                if exact is None:
                    tokens = step_on(side, inputs, None)[0].rollouts[0].transpose(0, 1).contiguous()  # (M, N, G)
                    exact = step_on(side, inputs, tokens)
                found = step_on(side, inputs, tokens)
            label = f"{name}, rounded logits" if are_rounded else name
            rows[are_rounded] = {"precision": label, **errors(exact, found)}
        seconds: dict[bool, list[float]] = {are_rounded: [] for are_rounded in rows}
        for _ in range(repeats):
            for are_rounded, taken in seconds.items():
                with logits(are_rounded):
                    taken.append(timed(lambda side=side: side.step(inputs), torch.device("cpu"))[1])
        if is_mixed:
            rows[False]["ratio"] = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        for are_rounded, row in rows.items():
            yield row | {"seconds": statistics.median(seconds[are_rounded])}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, repeats=3, output=RESULTS / "precision-smollm2-cpu.json")
    parser.add_argument("--length", type=int, default=128, help="tokens of the document")
    plan = parser.parse_args(arguments)
    preset = find_preset("smollm2", on_cuda=False)
    preset = preset.shrunken() if plan.tiny else preset
    Clock.count_cpu_seconds()
    model = preset.description.removesuffix(", full fine-tuning")
    card = {"model": model, "length": plan.length, **machine(torch.device("cpu"))}
    results: dict[str, Any] = {"card": card, "precisions": []}
    with quiet_folder() as folder:
        for tuning in TUNINGS:
            tuned = replace(preset, lora_rank=TUNINGS[tuning])
            for row in measure(tuned, plan.length, plan.repeats, folder):
                results["precisions"].append({"tuning": tuning, **row})
                cost = f"{row['seconds']:7.2f} s" + (f"{row['ratio']:6.2f} x" if "ratio" in row else "")
                print(
                    f"{tuning:5}{row['precision']:26}{row['logps_nats']:9.5f} nats, rewards "
                    f"{row['rewards_correlation']:.4f}, advantages {row['advantages_cosine']:.4f}, gradient "
                    f"{row['gradient_cosine']:.4f}{cost}",
                    flush=True,
                )
    store(plan.output, results)


if __name__ == "__main__":
    main()
