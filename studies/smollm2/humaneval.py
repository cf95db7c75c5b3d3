"""HumanEval: completions of its prompts, run with its tests in the sandbox.

The prompt is given without its last newline, which a byte-level BPE joins with the indentation of the body.
"""

from typing import Any

import sandbox

SECONDS = 3  # of CPU, as in the original


def prompt_of(problem: dict[str, Any]) -> str:
    """What a model completes."""
    return problem["prompt"].rstrip()


def passes(problem: dict[str, Any], completion: str) -> bool:
    """Whether the completed function passes the tests of its problem."""
    code = f"{prompt_of(problem)}{completion}\n{problem['test']}\n"
    found = sandbox.run_examples(code, [f"check({problem['entry_point']})"], cpu_seconds=SECONDS)
    return len(found) == 1 and found[0]["raised"] is None


def score(problems: list[dict[str, Any]], greedy: list[str], samples: list[list[str]]) -> dict[str, list[float]]:
    """By metric a value for each problem: pass@1 of the greedy completion, pass@1 and pass@N of N samples."""
    found: dict[str, list[float]] = {"humaneval_greedy": [], "humaneval_pass@1": [], "humaneval_pass@N": []}
    for problem, best, drawn in zip(problems, greedy, samples, strict=True):
        verdicts = {text: passes(problem, text) for text in {best, *drawn}}
        found["humaneval_greedy"].append(float(verdicts[best]))
        found["humaneval_pass@1"].append(sum(verdicts[text] for text in drawn) / len(drawn))
        found["humaneval_pass@N"].append(float(any(verdicts[text] for text in drawn)))
    return found
