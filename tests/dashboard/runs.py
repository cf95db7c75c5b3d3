"""Output folders of runs, written by hand as the callbacks write them."""

import json
import os
import socket
import time
from pathlib import Path

STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", "use_whitening": True, "log_completions": True}}


def append(path: Path, *rows: dict) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_run(folder: Path, state: str = "running", step: int = 0, max_steps: int = 100, **changes) -> None:
    """Write run.json of a run in this process."""
    run = {
        "state": state,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time() - 600,
        "updated": time.time(),
        "global_step": step,
        "max_steps": max_steps,
        "method": "EBFT in strided mode",
        "model": "some/model",
        "output_dir": str(folder),
        "config": STRIDED,
        "changed": {"base_model": "some/model", "learning_rate": 1e-3},
        "versions": {"python": "3.12.0", "ebft": "0.1.0"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run | changes))


def log_line(step: int, **changes) -> dict:
    """A line of metrics.jsonl of strided mode."""
    fraction = step / 100
    values = {
        "loss": 2 - fraction,
        "grad_norm": 1.5 + (step % 5) / 10,
        "ebft/alignment": 0.2 + 0.5 * fraction,
        "ebft/diversity": 0.05,
        "ebft/cfm_loss": 2 - fraction,
        "ebft/mean_reward": 0.1 + 0.5 * fraction,
        "ebft/rl_grad_norm": 1.0,
        "ebft/ce_grad_norm": 0.5,
        "throughput/generated_tokens_per_s": 1234.0,
        "throughput/documents_per_s": 4.0,
        "memory/peak_gib": 1.5,
        "budget/documents": 8 * step,
    }
    return {"step": step, "time": 1_700_000_000.0 + 2 * step, **values, **changes}


def held_out_line(step: int, cfm_loss: float) -> dict:
    return {"step": step, "time": 1_700_000_000.0 + 2 * step, "eval_cfm_loss": cfm_loss, "eval_ce_loss": 2.4}


def strided_entry(step: int, document: str = "def add(a, b):\n    return a + b", rewards=(0.1, 0.4)) -> dict:
    """An entry of rollouts.jsonl of strided mode: one document with one block."""
    samples = [
        {
            "completion": f"completion {index} of step {step}",
            "tokens": 8,
            "alignment": reward + 0.2,
            "diversity": 0.2 + index,
            "rewards": reward,
            "advantages": reward - sum(rewards) / len(rewards),
        }
        for index, reward in enumerate(rewards)
    ]
    block = {"anchor": 5, "offset": 15, "reference": document[15:], "samples": samples}
    return {"step": step, "document": document, "prompt_tokens": 0, "blocks": [block]}


def prompt_entry(step: int) -> dict:
    """An entry of rollouts.jsonl of structured mode: a conversation of two turns and two reward functions."""
    return {
        "step": step,
        "weights_step": step - 1,
        "staleness": 1,
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "ground_truth": "It is 4.",
        "remaining_turns": [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}],
        "samples": [
            {
                "replies": ["It is 5.", "No."],
                "tokens": 7,
                "reward": 0.75,
                "rewards": {"feature_matching": 0.5, "correct": None, "short": 0.5},
                "alignment": 0.6,
                "diversity": 0.1,
                "advantage": 0.2,
            }
        ],
    }
