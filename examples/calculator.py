"""A calculator as an environment, with rewards and prompts of arithmetic problems, for grpo_tools.yaml."""

import ast
import operator
from typing import Any

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MAX_LENGTH = 200  # characters of an expression


class Calculator:
    """One instance per rollout. The methods without underscore are tools; `reset` starts a rollout with its row."""

    def reset(self, answer: str, **row: Any) -> None:
        self._answer, self._result = float(answer), None

    def calculate(self, expression: str) -> str:
        """
        Evaluate an arithmetic expression.

        Args:
            expression: Numbers with +, -, *, / and parentheses, such as (3 + 4) * 2.

        Returns:
            The result.
        """
        if len(expression) > _MAX_LENGTH:
            raise ValueError(f"the expression has more than {_MAX_LENGTH} characters")
        self._result = _value(ast.parse(expression, mode="eval").body)
        return f"{self._result:g}"

    def get_reward(self) -> float:
        """0.5 if the last calculated result is the answer of the row, else 0."""
        return 0.5 * (self._result == self._answer)


def answers(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for each rollout whose last message ends with the answer, else 0."""
    return [float(_last_word(messages) == expected) for messages, expected in zip(completions, answer)]


def prompts(cfg: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Transform for rows with `question` and `answer`, whose answer is the number after ####, as in GSM8K."""

    def transform_fn(example: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
        return {
            "prompt": [
                {"role": "system", "content": "Solve the problem with the calculator. End with the number alone."},
                {"role": "user", "content": example["question"]},
            ],
            "answer": example["answer"].rpartition("####")[2].strip().replace(",", ""),
        }

    return transform_fn, {"remove_columns": ["question"]}


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)!r} is not supported. Use numbers with +, -, *, / and parentheses.")


def _last_word(messages: list[dict[str, Any]]) -> str:
    words = (messages[-1].get("content") or "").split()
    return words[-1].rstrip(".").replace(",", "") if words and messages[-1]["role"] == "assistant" else ""
