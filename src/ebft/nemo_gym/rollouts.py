"""Rollouts of NeMo Gym's agents: one request to `/run` per completion, and the token ids of its model calls."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

from ebft.errors import ConfigError, RolloutError
from ebft.nemo_gym.client import Failure, GymClient, Server, Servers
from ebft.nemo_gym.rewards import Failures, reward_in
from ebft.structured.rollouts.server import POLICY, AgentSampling
from ebft.structured.rollouts.turns import Rollout

_PATH = "/run"
_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_HINT = "Set return_token_id_information: true for the model server in NeMo Gym's config"


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

    def run(self, rows: list[dict[str, Any]], sampling: AgentSampling) -> list[Rollout]:
        agents = [self._servers.agent(row["nemo_gym_server"]) for row in rows]
        bodies = [request_body(row["nemo_gym_row"], sampling) for row in rows]
        answers = self._client.post_all([(agent.url + _PATH, body) for agent, body in zip(agents, bodies)])
        found = [
            answer if isinstance(answer, Failure) else self._rollout(answer, agent)
            for answer, agent in zip(answers, agents)
        ]
        self._failures.report(found, agents, _PATH)
        prompt_ids = next(rollout.prompt_ids for rollout in found if isinstance(rollout, Rollout))
        return [left_out(prompt_ids) if isinstance(rollout, Failure) else rollout for rollout in found]

    def cancel(self) -> None:
        self._client.cancel()

    def _rollout(self, answer: Any, agent: Server) -> Rollout | Failure:
        reward = reward_in(answer, agent, _PATH)
        calls = model_calls(answer, agent)
        if not calls:
            return Failure("the model returned no tokens; the conversation may exceed the server's max_model_len")
        parts = joined(calls)
        if len(parts) > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The agent {agent.name} does not continue the token ids of its own conversation: it changes earlier "
                "turns, or they are tokenised anew. Only the part with the most sampled tokens is trained on. This "
                "warning is given once.",
                stacklevel=2,
            )
        rollout = max(reversed(parts), key=lambda part: sum(part.generated))  # the last of equal ones
        rollout.reward = reward
        return rollout


def request_body(line: str, sampling: AgentSampling) -> dict[str, Any]:
    """The body of a request to `/run`: the row, with how to sample in its `responses_create_params`."""
    row = json.loads(line)
    params = row["responses_create_params"]
    limit = params.get("max_output_tokens")
    return row | {
        "responses_create_params": params
        | {
            "model": sampling.version,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": sampling.max_tokens if limit is None else min(limit, sampling.max_tokens),
        }
    }


def model_calls(answer: dict[str, Any], agent: Server) -> list[Call]:
    """The calls of the model in the output of a run, in order; none if the model returned nothing.

    An item of the output has the token ids of the call that ended with it. Raises RolloutError if a reply has none.
    """
    where = f"The response of the agent {agent.name} at {agent.url}{_PATH}"
    response = answer.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise RolloutError(f"{where} has no list response.output: {json.dumps(answer)[:300]}.")
    calls, pending = [], False
    for item in output:
        given = [name for name in _FIELDS if item.get(name) is not None]
        if given:
            calls.append(_call(item, given, where))
            pending = False
        elif item.get("type") == "function_call_output":
            if pending:
                raise RolloutError(f"{where} has a reply without {_FIELDS[1]}. {_HINT}.")
        elif _is_reply(item):
            pending = True  # the item that ends the same call has the token ids
    if pending:
        raise RolloutError(f"{where} has a reply without {_FIELDS[1]}. {_HINT}.")
    return [call for call in calls if call.ids]


def _is_reply(item: dict[str, Any]) -> bool:
    """Whether the policy sampled an item that is not empty. Without room for a reply, NeMo Gym returns an empty one."""
    if item.get("type") in ("function_call", "reasoning"):
        return True
    if item.get("role") != "assistant":
        return False
    content = item.get("content")
    if not isinstance(content, list):
        return bool(content)
    return any(part.get("text") if isinstance(part, dict) else part for part in content)


def _call(item: dict[str, Any], given: list[str], where: str) -> Call:
    missing = [name for name in _FIELDS if name not in given]
    if missing:
        raise RolloutError(f"{where} has {', '.join(given)} without {', '.join(missing)}. {_HINT}.")
    prompt_ids, ids, logps = (item[name] for name in _FIELDS)
    if not all(
        isinstance(x, list) and all(type(value) is int and value >= 0 for value in x) for x in (prompt_ids, ids)
    ):
        raise RolloutError(f"{where} has token ids that are not lists of integers.")
    if not isinstance(logps, list) or len(logps) != len(ids) or not all(isinstance(x, int | float) for x in logps):
        raise RolloutError(f"{where} does not have one log-probability for each of its {len(ids)} sampled tokens.")
    if not prompt_ids:
        raise RolloutError(f"{where} has a call of the model with an empty prompt.")
    return Call(prompt_ids, ids, [float(x) for x in logps])


def joined(calls: list[Call]) -> list[Rollout]:
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


def left_out(prompt_ids: list[int]) -> Rollout:
    """A rollout without sampled tokens; the trainer requires at least one token."""
    return Rollout(list(prompt_ids), [prompt_ids[-1]], [0], [0.0])


def check_agents(servers: Servers, names: list[str]) -> None:
    """Raise ConfigError if the model server of an agent requests another model, or returns no token ids."""
    for agent in dict.fromkeys(servers.agent(name).name for name in names):
        model = servers.model(servers.by_name[agent])
        if model is None or "return_token_id_information" not in model.settings:
            continue  # another kind of model server; its responses are checked
        if model.settings["return_token_id_information"] is not True:
            raise ConfigError(f"{_HINT}: {model.name}, which the agent {agent} uses, does not have it.")
        if model.settings.get("model") != POLICY:
            raise ConfigError(
                f"The model server {model.name} of NeMo Gym, which the agent {agent} uses, requests the model "
                f"{model.settings.get('model')!r}, which is not trained. Set model: {POLICY} in its config, the name "
                "of the policy's adapter on the vLLM server, and restart NeMo Gym."
            )
