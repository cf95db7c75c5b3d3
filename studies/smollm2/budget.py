"""What a run cost, and how many steps of SFT cost as much."""

from typing import Any

COSTS = ("documents", "generated_tokens", "flops")


def cost_of(metrics: dict[str, float], config: Any, steps: int) -> dict[str, float | None]:
    """Steps, documents (prompts), generated tokens and FLOPs of a run, as far as its metrics say them.

    Documents follow from the config and the steps alone: rows of all steps, completions divided by those of one prompt.
    """
    rows = steps * config.micro_batch_size * config.gradient_accumulation_steps
    completes = config.rl in ("grpo", "sdft") or (config.rl == "ebft" and config.ebft.mode == "structured")
    documents = rows // config.trl.num_generations if completes else rows
    found = {name: metrics.get(f"budget/{name}") for name in COSTS}
    return {**found, "steps": steps, "documents": found["documents"] or documents}


def matched_steps(sft: list[dict[str, float | None]], ebft: list[dict[str, float | None]]) -> int:
    """Steps of SFT that take the FLOPs of EBFT, from the costs of runs of both (mean over seeds).

    Raises ValueError where the runs do not know their FLOPs.
    """
    if not sft or not ebft or any(not cost["flops"] for cost in (*sft, *ebft)):
        raise ValueError("SFT at the FLOPs of EBFT needs budget/flops of finished runs of both, and there is none.")
    per_step = sum(cost["flops"] / cost["steps"] for cost in sft) / len(sft)
    return round(sum(cost["flops"] for cost in ebft) / len(ebft) / per_step)
