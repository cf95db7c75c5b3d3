"""Output folders of runs, written by hand as the callbacks write them."""

import json
import os
import socket
import time
from pathlib import Path

STRIDED = {"rl": "ebft", "log_rollouts": "all", "ebft": {"mode": "strided", "use_whitening": True}}


def append(path: Path, *rows: dict) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_run(folder: Path, state: str = "running", step: int = 0, max_steps: int = 100, **changes) -> None:
    """Write run.json of a run in this process."""
    run = {"state": state, "pid": os.getpid(), "host": socket.gethostname(), "output_dir": str(folder)}
    run |= {"started": time.time() - 600, "updated": time.time(), "global_step": step, "max_steps": max_steps}
    run |= {"method": "EBFT in strided mode", "model": "some/model", "config": STRIDED}
    run |= {"changed": {"base_model": "some/model", "learning_rate": 1e-3}}
    run |= {"versions": {"python": "3.12.0", "ebft": "0.1.0"}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run | changes))


def log_line(step: int, **changes) -> dict:
    """A line of metrics.jsonl of strided mode."""
    fraction = step / 100
    reward = {"alignment": 0.2 + 0.5 * fraction, "diversity": 0.05, "mean_reward": 0.1 + 0.5 * fraction}
    terms = {"cfm_loss": 2 - fraction, "rl_grad_norm": 1.0, "ce_grad_norm": 0.5}
    values = {"loss": 2 - fraction, "grad_norm": 1.5 + (step % 5) / 10}
    values |= {f"ebft/{name}": value for name, value in (reward | terms).items()}
    values |= {"throughput/generated_tokens_per_s": 1234.0, "throughput/documents_per_s": 4.0}
    values |= {"memory/peak_gib": 1.5, "budget/documents": 8 * step}
    return {"step": step, "time": 1_700_000_000.0 + 2 * step, **values, **changes}


def held_out_line(step: int, cfm_loss: float) -> dict:
    return {"step": step, "time": 1_700_000_000.0 + 2 * step, "eval_cfm_loss": cfm_loss, "eval_ce_loss": 2.4}


def strided_entry(step: int, document: str = "def add(a, b):\n    return a + b", rewards=(0.1, 0.4)) -> dict:
    """An entry of rollouts.jsonl of strided mode: one document with one block."""
    samples = [
        {"completion": f"completion {index} of step {step}", "tokens": 8, "alignment": reward + 0.2, "rewards": reward}
        | {"diversity": 0.2 + index, "advantages": reward - sum(rewards) / len(rewards)}
        for index, reward in enumerate(rewards)
    ]
    block = {"anchor": 5, "offset": 15, "reference": document[15:], "samples": samples}
    return {"step": step, "document": document, "prompt_tokens": 0, "blocks": [block]}


def prompt_entry(step: int) -> dict:
    """An entry of rollouts.jsonl of structured mode: a conversation of two turns and two reward functions."""
    turns = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    sample = {"replies": ["It is 5.", "No."], "tokens": 7, "reward": 0.75, "alignment": 0.6, "diversity": 0.1}
    sample |= {"rewards": {"feature_matching": 0.5, "correct": None, "short": 0.5}, "advantage": 0.2}
    entry = {"step": step, "weights_step": step - 1, "staleness": 1, "ground_truth": "It is 4.", "samples": [sample]}
    return entry | {"prompt": [{"role": "user", "content": "What is 2 + 2?"}], "remaining_turns": turns}
