"""Rewards and rollouts of NeMo Gym.

A resources server verifies each reply of the policy; or an agent holds a conversation, with one request to `/run`, and
its environment scores it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebft.config.keys.data import ENVIRONMENT, VERIFY
from ebft.errors import ConfigError, RolloutError, doing, warn
from ebft.nemo_gym.client import Failure, GymClient, Server, Servers
from ebft.structured.generation import REWARD
from ebft.structured.rollouts.server import POLICY
from ebft.structured.rollouts.turns import Rollout

FAILED = "nemo_gym/failed"  # metric: fraction of completions without a reward
_PATH = "/run"
_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


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
            raise RolloutError(f"All {len(answers)} requests of this batch to NeMo Gym failed. Last failure: {last}.")
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{len(failed)} of {len(answers)} requests to NeMo Gym failed, and {self._consequence}. Last failure: "
                f"{last}. This warning is given once; the metric {FAILED} counts failures."
            )


class VerifyReward:
    """Reward function that posts each reply to `/verify` of its row's resources server, concurrently.

    A completion whose request failed for good has no reward (None). Raises RolloutError if all of a batch failed, or if
    a response has no reward.
    """

    __name__ = VERIFY  # the name of the reward in TRL's logs

    def __init__(self, client: GymClient, servers: Servers, model_name: str = POLICY) -> None:
        self._client, self._servers, self._model_name = client, servers, model_name
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
            {**json.loads(row), "response": response_of(completion, self._model_name)}
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
    if isinstance(answer, Failure) or (isinstance(answer, dict) and answer.get("mask_sample") is True):
        return None
    reward = answer.get("reward") if isinstance(answer, dict) else None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(f"{server.name} at {server.url}{path} returned no finite reward: {json.dumps(answer)[:300]}")
    return float(reward)


def response_of(completion: str | list[dict[str, Any]], model_name: str = POLICY) -> dict[str, Any]:
    """A completion as a response of the Responses API, with one output item per message and per tool call."""
    messages = [{"content": completion}] if isinstance(completion, str) else completion
    output: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            message_item = {"id": f"msg_{len(output)}", "type": "message", "role": "assistant", "content": [text]}
            output.append(message_item | {"status": "completed"})
        for call in calls:
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            ids = {"id": f"fc_{len(output)}", "call_id": call.get("id") or f"call_{len(output)}"}
            item = {"type": "function_call", "name": function["name"], "arguments": as_text, "status": "completed"}
            output.append(ids | item)
    required = {"id": "resp_ebft", "object": "response", "created_at": 0, "parallel_tool_calls": True}
    return {**required, "model": model_name, "output": output, "tool_choice": "auto", "tools": []}


@dataclass(frozen=True)
class Call:
    """One call of the model: the token ids of its whole context, and those sampled, with their log-probabilities."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]


class GymAgents:
    """Holds conversations with the agent servers of NeMo Gym.

    A run that failed for good is a rollout of one token that is not trained on, without a reward. Raises RolloutError
    if all of a batch failed, or if a response has no token ids.
    """

    def __init__(self, client: GymClient, servers: Servers) -> None:
        self._client, self._servers = client, servers
        self._failures = Failures("their completions are left out of the loss")
        self._has_warned = False

    def run(self, rows: list[dict[str, Any]], params: dict[str, Any]) -> list[Rollout]:
        agents = [self._servers.agent(row["nemo_gym_server"]) for row in rows]
        bodies = [request_body(row["nemo_gym_row"], params) for row in rows]
        requests = [(agent.url + _PATH, body) for agent, body in zip(agents, bodies)]
        found = [
            answer if isinstance(answer, Failure) else self._rollout(answer, agent)
            for answer, agent in zip(self._client.post_all(requests, are_runs=True), agents)
        ]
        self._failures.report(found, agents, _PATH)
        prompt_ids = next(rollout.prompt_ids for rollout in found if isinstance(rollout, Rollout))
        # Without sampled tokens; the trainer requires at least one token.
        left_out = lambda: Rollout(list(prompt_ids), [prompt_ids[-1]], [0], [0.0])
        return [left_out() if isinstance(rollout, Failure) else rollout for rollout in found]

    def cancel(self) -> None:
        self._client.cancel()

    def _rollout(self, answer: Any, agent: Server) -> Rollout | Failure:
        reward = reward_in(answer, agent, _PATH)
        calls = model_calls(answer, agent)
        if not calls:
            return Failure("the model returned no tokens; the conversation may exceed the server's max_model_len")
        parts = joined_calls(calls)
        if len(parts) > 1 and not self._has_warned:
            self._has_warned = True
            warn(
                f"The agent {agent.name} does not continue the token ids of its own conversation: it changes earlier "
                "turns, or they are tokenised anew. Only the part with the most sampled tokens is trained on. This "
                "warning is given once."
            )
        rollout = max(reversed(parts), key=lambda part: sum(part.generated))  # the last of equal ones
        rollout.reward = reward
        return rollout


def request_body(line: str, params: dict[str, Any]) -> dict[str, Any]:
    """The body of a request to `/run`: the row, with how to sample in its `responses_create_params`."""
    row = json.loads(line)
    own = row["responses_create_params"]
    limits = [limit for limit in (own.get("max_output_tokens"), params["max_output_tokens"]) if limit is not None]
    return row | {"responses_create_params": own | params | {"max_output_tokens": min(limits)}}


def model_calls(answer: dict[str, Any], agent: Server) -> list[Call]:
    """The calls of the model in the output of a run, in order; none if the model returned nothing.

    An item of the output has the token ids of the call that ended with it. Raises RolloutError if a reply has none.
    """
    where, calls, pending = f"the response of the agent {agent.name} at {agent.url}{_PATH}", [], False
    with doing(f"reading {where}"):
        for item in answer["response"]["output"]:
            if any(item.get(name) is not None for name in _FIELDS):
                prompt_ids, ids, logps = (item[name] for name in _FIELDS)
                calls.append(Call(prompt_ids, ids, [float(logp) for logp, _ in zip(logps, ids, strict=True)]))
                pending = False
            elif item.get("type") != "function_call_output":
                content = item.get("content") if item.get("role") == "assistant" else None
                texts = [part.get("text") if isinstance(part, dict) else part for part in content or ()]
                # The item that ends the same call has the token ids. An empty reply, which NeMo Gym returns without
                # room for one, has none.
                pending |= item.get("type") in ("function_call", "reasoning") or any(texts)
            elif pending:
                break
    if pending:
        raise RolloutError(f"A reply in {where} has no {_FIELDS[1]}: set return_token_id_information: true.")
    return [call for call in calls if call.ids]


def joined_calls(calls: list[Call]) -> list[Rollout]:
    """Join consecutive calls to rollouts: a new one starts where the context is not an exact continuation.

    Tokens that a context adds to the previous one and its reply are given, such as the results of tools. Every sampled
    token thus has the context that it was sampled in.
    """
    rollouts: list[Rollout] = []
    for call in calls:
        before = rollouts[-1].prompt_ids + rollouts[-1].ids if rollouts else None
        if before is None or call.prompt_ids[: len(before)] != before:
            rollouts.append(Rollout(list(call.prompt_ids)))
        else:
            rollouts[-1].give(call.prompt_ids[len(before) :])
        rollouts[-1].reply(list(call.ids), list(call.logps))
    return rollouts


def check_agents(servers: Servers, names: list[str], max_turns: int | None = None) -> None:
    """Raise ConfigError if an agent's model server requests another model, or it may take more than `max_turns`."""
    for agent in dict.fromkeys(servers.agent(name).name for name in names):
        steps = servers.by_name[agent].settings.get("max_steps")
        if max_turns is not None and not (isinstance(steps, int) and 0 < steps <= max_turns):
            raise ConfigError(
                f"nemo_gym_max_turns: {max_turns}, but the agent {agent} ends conversations at max_steps: {steps}. Set "
                f"max_steps: {max_turns} in NeMo Gym's config and restart it, or remove nemo_gym_max_turns."
            )
        model = servers.model(servers.by_name[agent])
        if model is None or "return_token_id_information" not in model.settings:
            continue  # another kind of model server; its responses are checked
        if model.settings.get("model") != POLICY:
            raise ConfigError(
                f"The agent {agent} requests the model {model.settings.get('model')!r}, which is not trained. Set "
                f"model: {POLICY} in NeMo Gym's config of the model server {model.name}, and restart it."
            )
