"""NeMo Gym with `rl: grpo`: its checks, its rewards, and its agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ebft.config import rules
from ebft.config.keys.data import ENVIRONMENT, VERIFY, NemoGymKeys, path_in
from ebft.errors import warn

if TYPE_CHECKING:
    from datasets import Dataset

    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig
    from ebft.nemo_gym.client import GymClient, Servers

PLUGIN = "axolotl.integrations.nemo_gym.NemoGymPlugin"
_OTHER_NAMES = {
    f"axolotl.integrations.nemo_gym.{module}{function}": name
    for module in ("", "rewards.")
    for function, name in (("reward_nemo_gym_verify", VERIFY), ("reward_env", ENVIRONMENT))
}
_TRLS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # as `trl grpo` names them
_OTHER_NAMES |= {name: f"trl.rewards.{name}" for name in _TRLS}
# Sampling parameters that the requests of NeMo Gym's agents do not have.
_NOT_SENT = ("top_k", "min_p", "repetition_penalty", "generation_kwargs", "vllm_guided_decoding_regex")


def resolve_gym_names(config: MethodConfig) -> None:
    """Replace the names that configs for other trainers use, and warn of keys without effect."""
    if config.trl.reward_funcs:
        config.trl.reward_funcs = [_OTHER_NAMES.get(name, name) for name in config.trl.reward_funcs]
    if not config.nemo_gym_enabled and _is_read(config):
        idle = sorted(set(NemoGymKeys.model_fields) & config.model_fields_set - {"nemo_gym_enabled"})
        idle += [f"plugins: {PLUGIN}"] if PLUGIN in config.plugins else []
        if idle:
            warn(f"{', '.join(idle)}: no effect without nemo_gym_enabled: true.")
    elif config.nemo_gym_auto_clone:
        warn("nemo_gym_auto_clone: true has no effect: the repository is never downloaded. Clone it to nemo_gym_dir.")
    config.plugins = [name for name in config.plugins if name != PLUGIN]
    if config.nemo_gym_enabled and _is_read(config):
        if _reward(config) not in (config.trl.reward_funcs or []):
            config.trl.reward_funcs = [*(config.trl.reward_funcs or []), _reward(config)]
        of_agents = ("nemo_gym_run_timeout", "nemo_gym_max_turns")
        other = ("nemo_gym_model_name",) if config.nemo_gym_multi_turn else of_agents
        idle = ", ".join(key for key in other if key in config.model_fields_set)
        if idle:
            warn(f"{idle}: no effect with nemo_gym_multi_turn: {_mode(config)}.")
        slices = _slices(config)
        for entry in config.datasets:
            entry.split = slices.get(path_in(".", entry.path), entry.split)


def _mode(config: MethodConfig) -> str:
    return str(config.nemo_gym_multi_turn).lower()


def _reward(config: MethodConfig) -> str:
    return ENVIRONMENT if config.nemo_gym_multi_turn else VERIFY


def _slices(config: MethodConfig) -> dict[str, str]:
    """The split of each file whose first rows alone are read."""
    return {
        path_in(config.nemo_gym_dir, entry.path): f"train[:{entry.max_samples}]"
        for entry in config.nemo_gym_datasets
        if entry.max_samples is not None
    }


def conflicts(config: MethodConfig) -> Iterator[str]:
    """Contradictions between keys, one message each."""
    if config.nemo_gym_enabled and not _is_read(config):
        yield f"nemo_gym_enabled: true needs rl: grpo. Rows of NeMo Gym have no references for {config.method.name}."
        return
    if not config.nemo_gym_enabled:
        return
    if not config.nemo_gym_datasets:
        yield "nemo_gym_enabled: true needs nemo_gym_datasets, the files of its rows, each with its path."
    ours = {path_in(config.nemo_gym_dir, entry.path) for entry in config.nemo_gym_datasets}
    theirs = {path_in(".", entry.path) for entry in config.datasets}
    if ours and ours != theirs:
        yield f"datasets and nemo_gym_datasets list different files: {', '.join(sorted(ours ^ theirs))}. Keep one."
    slices = _slices(config)
    for entry in config.datasets:
        of_file = slices.get(path_in(".", entry.path), entry.split)
        if entry.split not in ("train", of_file):
            yield f"datasets.split: {entry.split} of {entry.path} contradicts its max_samples in nemo_gym_datasets."
    wanted = _reward(config)
    other = VERIFY if config.nemo_gym_multi_turn else ENVIRONMENT
    if other in [_OTHER_NAMES.get(name, name) for name in config.trl.reward_funcs or []]:
        yield (
            f"nemo_gym_multi_turn: {_mode(config)} uses the reward {wanted}: add it to trl.reward_funcs in place of "
            f"{other}, or change nemo_gym_multi_turn."
        )
    if config.nemo_gym_multi_turn:
        yield from _agents(config)


def _is_read(config: MethodConfig) -> bool:
    return issubclass(config.method.keys, NemoGymKeys)


def _agents(config: MethodConfig) -> Iterator[str]:
    if not config.uses_server or config.adapter is None:
        yield (
            "nemo_gym_multi_turn: true needs trl.use_vllm: true with vllm_mode: server or managed, and adapter: lora: "
            "NeMo Gym's agents sample from an adapter on the vLLM server."
        )
    for key in rules.INTERACTIVE:
        if getattr(config.trl, key):
            yield f"trl.{key} has no effect with nemo_gym_multi_turn: true: agents hold the conversations. Remove it."
    given = [f"trl.{key}" for key in _NOT_SENT if getattr(config.trl, key) is not None]
    if given:
        yield (
            f"{', '.join(given)}: NeMo Gym's agents do not send it to the vLLM server. Remove it; temperature, top_p "
            "and max_completion_length are sent."
        )


def problems_here(config: MethodConfig, machine: Machine) -> Iterator[str]:
    """Requirements that this machine does not meet."""
    if config.nemo_gym_enabled and config.nemo_gym_multi_turn and machine.processes > 1:
        yield "nemo_gym_multi_turn: true is supported in one training process only. Launch one process."


def check_gym_rows(config: MethodConfig, *datasets: Dataset | None) -> None:
    """Wait for the servers of all rows. Raises ConfigError or RolloutError if one is unknown, or does not respond."""
    from ebft.nemo_gym.rewards import check_agents

    names = sorted({name for rows in datasets if rows is not None for name in rows.unique("nemo_gym_server")})
    client, servers = connect(config)
    uses_agents = config.nemo_gym_multi_turn and servers.has_agents
    with closing(client):
        if config.nemo_gym_multi_turn and not uses_agents:
            warn(
                "nemo_gym_multi_turn: true needs agent servers (responses_api_agents), but NeMo Gym has none: replies "
                "are single, and /verify of the resources servers scores them (nemo_gym_verify). Add an agent server "
                "to the config of NeMo Gym, or set nemo_gym_multi_turn: false."
            )
        if uses_agents:
            check_agents(servers, names, config.nemo_gym_max_turns)
        else:
            lines = (line for rows in datasets if rows is not None for line in rows["nemo_gym_row"])
            if any(json.loads(line)["responses_create_params"].get("tools") for line in lines):
                warn(
                    "Some rows of NeMo Gym have tools, which are not part of the prompts of single replies. Set "
                    "nemo_gym_multi_turn: true to let an agent call them."
                )
        find = servers.agent if uses_agents else servers.resources
        for server in {find(name).name: find(name) for name in names}.values():
            client.wait_for(server, config.nemo_gym_server_timeout)


def connect(config: MethodConfig) -> tuple[GymClient, Servers]:
    """A client of NeMo Gym, and its servers. Raises RolloutError if the head server does not respond."""
    from ebft.nemo_gym.client import GymClient

    client = GymClient(config.nemo_gym_head_port, config.nemo_gym_verify_timeout, config.nemo_gym_run_timeout)
    return client, client.servers(config.nemo_gym_server_timeout)


def rewards_and_agents(config: MethodConfig) -> tuple[dict[str, Any], Any]:
    """The reward functions of NeMo Gym by name, and its agents (None unless they hold the conversations).

    Without agent servers, a config for several turns has the reward of single replies.
    """
    if not config.nemo_gym_enabled:
        return {}, None
    from ebft.nemo_gym.rewards import EnvironmentReward, GymAgents, VerifyReward

    client, servers = connect(config)
    if config.nemo_gym_multi_turn and servers.has_agents:
        return {ENVIRONMENT: EnvironmentReward()}, GymAgents(client, servers)
    verify = VerifyReward(client, servers, config.nemo_gym_model_name or config.base_model)
    return {ENVIRONMENT if config.nemo_gym_multi_turn else VERIFY: verify}, None
