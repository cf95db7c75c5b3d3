"""Rewards of NeMo Gym: a resources server verifies each reply, or an agent's environment has already scored it."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ebft.errors import RolloutError
from ebft.nemo_gym.client import Failure, GymClient, Server, Servers
from ebft.nemo_gym.keys import ENVIRONMENT, VERIFY
from ebft.structured.generation import REWARD
from ebft.structured.rollouts.server import POLICY

FAILED = "nemo_gym/failed"  # metric: fraction of completions without a reward


class Failures:
    """Reports requests that failed for good: one warning for the first, an error if all of a batch failed."""

    def __init__(self, consequence: str) -> None:
        self._consequence, self._has_warned = consequence, False

    def report(self, answers: list[Any], servers: list[Server], path: str) -> None:
        """Warn of failures among `answers`, given the server of each. Raises RolloutError if all are failures."""
        failed = [(answer, server) for answer, server in zip(answers, servers) if isinstance(answer, Failure)]
        if not failed:
            return
        failure, server = failed[-1]
        last = f"{server.name} at {server.url}{path}: {failure.reason}"
        if len(failed) == len(answers):
            raise RolloutError(
                f"All {len(answers)} requests of this batch to NeMo Gym failed. Last failure: {last}. See the server's "
                "log, and resume training from the last checkpoint."
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{len(failed)} of {len(answers)} requests to NeMo Gym failed, and {self._consequence}. Last failure: "
                f"{last}. This warning is given once; the metric {FAILED} counts failures.",
                stacklevel=2,
            )


class VerifyReward:
    """Reward function that posts each reply to `/verify` of its row's resources server, concurrently.

    A completion whose request failed for good has no reward (None). Raises RolloutError if all of a batch failed, or if
    a response has no reward.
    """

    __name__ = VERIFY  # the name of the reward in TRL's logs

    def __init__(self, client: GymClient, servers: Servers) -> None:
        self._client, self._servers = client, servers
        self._failures = Failures("their completions have no reward")

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        nemo_gym_row: list[str],
        nemo_gym_server: list[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        servers = [self._servers.resources(name) for name in nemo_gym_server]
        bodies = [
            {**json.loads(row), "response": response_of(completion)}
            for row, completion in zip(nemo_gym_row, completions)
        ]
        answers = self._client.post_all([(f"{server.url}/verify", body) for server, body in zip(servers, bodies)])
        self._failures.report(answers, servers, "/verify")
        rewards = [reward_in(answer, server, "/verify") for answer, server in zip(answers, servers)]
        _log_failed(rewards, log_metric)
        return rewards


class EnvironmentReward:
    """Reward function that returns what the environments of agents gave for their rollouts; None for failed ones."""

    __name__ = ENVIRONMENT

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        _log_failed(columns[REWARD], log_metric)
        return columns[REWARD]


def _log_failed(rewards: list[float | None], log_metric: Callable[[str, float], None] | None) -> None:
    if log_metric is not None:
        log_metric(FAILED, rewards.count(None) / len(rewards))


def reward_in(answer: Any, server: Server, path: str) -> float | None:
    """The reward in a response; None for a failure, or if the environment marks the sample as not measured.

    Raises RolloutError if the response has no finite number as its reward.
    """
    if isinstance(answer, Failure):
        return None
    if isinstance(answer, dict) and answer.get("mask_sample") is True:
        return None
    reward = answer.get("reward") if isinstance(answer, dict) else None
    if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise RolloutError(
            f"The response of {server.name} at {server.url}{path} has no finite number as `reward`: "
            f"{json.dumps(answer)[:300]}. Is it a server of NeMo Gym?"
        )
    return float(reward)


def response_of(completion: str | list[dict[str, Any]]) -> dict[str, Any]:
    """A completion as a response of the Responses API, with one output item per message and per tool call."""
    messages = [{"content": completion}] if isinstance(completion, str) else completion
    output: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            output.append(
                {
                    "id": f"msg_{len(output)}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [text],
                }
            )
        for call in calls:
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            output.append(
                {
                    "id": f"fc_{len(output)}",
                    "call_id": call.get("id") or f"call_{len(output)}",
                    "type": "function_call",
                    "name": function["name"],
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                    "status": "completed",
                }
            )
    return {
        "id": "resp_ebft",
        "object": "response",
        "created_at": 0,
        "model": POLICY,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
