"""GRPO (`rl: grpo`): completions of prompts with user-defined reward functions, based on TRL's trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ebft.catalog import reward_problem
from ebft.config import rules
from ebft.config.keys.data import ENVIRONMENT, VERIFY, NemoGymKeys
from ebft.config.options import DropoutOption, RewardOptions, SharedPrefixOption
from ebft.config.section import option_names
from ebft.config.trl import TRLSection
from ebft.config.user_functions import find_function
from ebft.errors import ConfigError, warn
from ebft.methods import method, nemo_gym
from ebft.methods.method import HEALTHY_ROLLOUTS, EvaluationSampling, Method, MethodConfig, Needs

if TYPE_CHECKING:
    from ebft.data.load import LoadedRows
    from ebft.machine import Machine
    from ebft.methods.views import RowView

FEATURE_MATCHING = "feature_matching"
_CAP, _FLOOR = "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_min"
_TRLS_CAP = 3.0  # where the first is unset
# Keys of `trl:` that are arguments of TRL's GRPOConfig under another name.
_OTHER_NAME = {"vllm_guided_decoding_regex": "vllm_structured_outputs_regex", _CAP: "vllm_importance_sampling_clip_max"}


class GRPO(Method):
    """RolloutGRPOTrainer on rows of prompts."""

    name = "rl: grpo"
    tag = "grpo"
    metrics = ("reward", "loss")
    rows = "prompts"
    keys = NemoGymKeys
    needs_reference = False
    unsupported = {"group_by_length": "completions are grouped by prompt"}
    phases = {"rollouts": "_generate", "rewards and features": "_calculate_rewards"}
    healthy = {"grad_norm": (None, 1.0), **HEALTHY_ROLLOUTS}
    own_rewards: tuple[str, ...] = ()  # rewards that are always included
    arguments = "ebft.structured:RolloutGRPOConfig"
    trainer = "ebft.structured:RolloutGRPOTrainer"

    def summary(self, config: MethodConfig) -> str:
        found = config.trl.environment_factory or []  # a path, or paths by the names of the environments
        names = [*(config.trl.reward_funcs or []), *([found] if isinstance(found, str) else dict(found).values())]
        return f"GRPO on the rewards {', '.join(f'`{name}`' for name in names)}"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        yield from nemo_gym.conflicts(config)
        ours, theirs = config.vllm.port, config.trl.vllm_server_port
        if config.manages_server and "port" in config.vllm.model_fields_set and theirs not in (None, ours):
            yield f"vllm.port: {ours} and trl.vllm_server_port: {theirs} differ with vllm_mode: managed. Keep one."

    def resolve(self, config: MethodConfig) -> None:
        """One warning for each key that has no effect on full completions."""
        nemo_gym.resolve_gym_names(config)
        rules.follow_samples(config.ebft, config.trl)
        method.warn_of_unmet(config, _NEEDS)
        for message in _idle(config):
            warn(f"{message}.")
        if config.torch_compile:
            config.torch_compile = False
            warn(rules.compiled(rules.in_config, "structured mode and GRPO"))
        self.warn_of_idle_options(config)
        limit = config.vllm.max_model_len
        if config.uses_server and limit is not None and config.sequence_len > limit:
            warn(
                f"vllm.max_model_len: {limit} is less than sequence_len: {config.sequence_len}: completions of longer "
                "prompts are cut at the first, and a prompt without room for one ends the run. Set both to one value."
            )
        if FEATURE_MATCHING in self._reward_names(config):
            rules.warn_of_reward(config.ebft)

    def warn_of_idle_options(self, config: MethodConfig) -> None:
        """One warning for all unused keys of `ebft:`."""
        read = set(option_names(DropoutOption, SharedPrefixOption))
        if FEATURE_MATCHING in (config.trl.reward_funcs or []):
            read |= set(option_names(RewardOptions))
        read |= rules.samples_in_effect(config.ebft, config.trl)
        idle = ", ".join(f"ebft.{key}" for key in sorted(config.ebft.model_fields_set - read))
        if idle:
            warn(f"{idle}: no effect with {self.name} and these rewards.")

    def problems(self, config: MethodConfig) -> Iterator[str]:
        names = self._reward_names(config)
        trl, size, steps = config.trl, config.micro_batch_size, config.gradient_accumulation_steps
        if trl.generation_batch_size is None:
            yield from rules.groups(size, steps, trl.num_generations, rules.in_config, "gradient_accumulation_steps")
        yield from _rewards(config, names, self.own_rewards)
        given = [name for name in rules.INTERACTIVE if getattr(trl, name)]
        yield from rules.prefetch(trl.async_prefetch, config.uses_server, rules.in_config)
        yield from rules.regex(trl.vllm_guided_decoding_regex, trl.use_vllm, rules.in_config)
        floor, cap = getattr(trl, _FLOOR), getattr(trl, _CAP) or _TRLS_CAP
        if floor is not None and floor >= cap:
            yield f"trl.{_FLOOR}: {floor:g} must be less than trl.{_CAP}: {cap:g}, for example {1 / max(cap, 1.5):.2g}."
        compares = FEATURE_MATCHING in names
        yield from rules.interactive(given, trl.async_prefetch, compares, trl.reward_num_workers, rules.in_config)
        if given and config.fsdp and not config.uses_server:
            yield f"trl.{given[0]} is incompatible with fsdp without a vLLM server. Set trl.use_vllm or remove fsdp."
        _load_interactive(config)

    def missing_packages(self, config: MethodConfig) -> Iterator[str]:
        is_here = not config.uses_server or (config.manages_server and config.vllm.python is None)
        if config.trl.use_vllm and is_here and find_spec("vllm") is None:
            yield (
                f"trl.vllm_mode: {config.trl.vllm_mode} needs vLLM in this environment: pip install 'ebft[vllm]'. With "
                "vllm_mode: server or managed, vLLM can be in an environment of its own (vllm.python)."
            )

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        has_adapter, has_cuda = config.adapter is not None, machine.has_accelerator
        yield from rules.full_weights(config.uses_server, has_adapter, has_cuda, rules.in_config)
        yield from nemo_gym.problems_here(config, machine)

    def _reward_names(self, config: MethodConfig) -> list[str]:
        return [*self.own_rewards, *(config.trl.reward_funcs or [])]

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        trl = config.trl
        given = ", ".join(f"trl.{name}" for name in rules.INTERACTIVE if getattr(trl, name))
        if given:
            raise ConfigError(f"ebft evaluate samples completions without {given}. Hold out rows in training instead.")
        return sampled_as(trl)

    def samples_per_group(self, config: MethodConfig) -> int:
        return config.trl.num_generations

    def compares_features(self, config: MethodConfig) -> bool:
        return FEATURE_MATCHING in self._reward_names(config)

    def check_rows(self, config: MethodConfig, rows: LoadedRows) -> None:
        if config.nemo_gym_enabled:
            nemo_gym.check_gym_rows(config, rows.train, rows.evaluation)

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.methods.views import PromptView

        compares = self.compares_features(config)
        given = ", ".join(f"trl.{name}" for name in rules.INTERACTIVE if getattr(config.trl, name))
        note = f"shown without what {given} adds to prompts in training" if given else None
        return PromptView(tokenizer, config.chat_template_kwargs, compares, note=note, **self.cross_entropy(config))

    def cross_entropy(self, config: MethodConfig) -> dict[str, Any]:
        """The options of a cross-entropy on references, if the method has one."""
        return {}

    def services(self, config: MethodConfig) -> AbstractContextManager[None]:
        if not config.nemo_gym_enabled:
            return nullcontext()
        from ebft.nemo_gym.client import started_servers

        return started_servers(config, config.output_dir)

    def steps_per_epoch(self, config: MethodConfig, machine: Machine, rows: int) -> int:
        """TRL repeats each prompt `num_generations` times and each generation batch `num_iterations` times."""
        trl, accumulation = config.trl, config.gradient_accumulation_steps
        samples_per_micro_step = config.micro_batch_size * machine.processes
        completions = trl.generation_batch_size or samples_per_micro_step * accumulation
        prompts = max(1, completions // trl.num_generations)
        micro_steps = math.ceil(rows / prompts) * (completions // samples_per_micro_step) * (trl.num_iterations or 1)
        return max(1, math.ceil(micro_steps / accumulation))

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        trl, vllm = config.trl, config.vllm
        arguments = {argument.name for argument in fields(self.arguments_class())} - _OTHER_NAME.keys()
        kwargs = {key: getattr(trl, key) for key in type(trl).model_fields if key in arguments}
        kwargs |= {name: getattr(trl, key) for key, name in _OTHER_NAME.items()}
        kwargs["vllm_server_host"], kwargs["vllm_server_port"] = config.server_address
        if trl.use_vllm and not config.uses_server:
            kwargs["vllm_gpu_memory_utilization"] = vllm.gpu_memory_utilization
            kwargs["vllm_max_model_length"] = vllm.max_model_len
            kwargs["vllm_tensor_parallel_size"] = vllm.tensor_parallel_size
        kwargs |= {name: getattr(config.ebft, name) for name in self.own_options()}
        kwargs |= {"log_rollouts": config.log_rollouts, "shuffle_dataset": not config.curriculum_sampling}
        kwargs |= whole_groups(config)
        return {name: value for name, value in kwargs.items() if value is not None}

    def own_options(self) -> list[str]:
        """The keys of `ebft:` that are passed to its training arguments."""
        return option_names(DropoutOption, SharedPrefixOption)

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.structured.reward import load_reward_funcs

        built_in, agents = nemo_gym.rewards_and_agents(config)
        return method.class_at(self.trainer)(
            model=model,
            reward_funcs=load_reward_funcs(config.trl, config.ebft, model, tokenizer, built_in),
            agents=agents,
            server_failure=lambda: server.failure if server is not None else None,
            **_load_interactive(config),
            **common,
        )


def sampled_as(trl: TRLSection) -> EvaluationSampling:
    """How `ebft evaluate` samples as training does, by the section `trl:`."""
    options = {name: getattr(trl, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    return EvaluationSampling(
        trl.num_generations,
        trl.temperature,
        {name: value for name, value in options.items() if value is not None},
        dict(trl.generation_kwargs or {}),
        trl.vllm_guided_decoding_regex,
    )


def whole_groups(config: MethodConfig) -> dict[str, int]:
    """The batch size of evaluations if none is given: groups of completions that are not divided."""
    if config.eval_batch_size is not None:
        return {}
    size = config.trl.num_generations
    return {"per_device_eval_batch_size": math.ceil(config.micro_batch_size / size) * size}


_AGGREGATION = "normalize_then_sum"


class GDPO(GRPO):
    """GRPO with `trl.multi_objective_aggregation: normalize_then_sum`."""

    name = "rl: gdpo"
    tag = "gdpo"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        given = config.trl.multi_objective_aggregation
        if given not in (None, _AGGREGATION):
            yield f"trl.multi_objective_aggregation: {given} contradicts rl: gdpo. Remove it, or set rl: grpo."

    def resolve(self, config: MethodConfig) -> None:
        config.trl.multi_objective_aggregation = _AGGREGATION
        super().resolve(config)


_NEEDS: Needs = (
    ("trl.streaming_min_groups", "streaming_partial_batch: true", lambda c: c.trl.streaming_partial_batch),
    ("trl.prefetch_depth", "async_prefetch: true", lambda c: c.trl.async_prefetch),
    ("trl.reroll_max_groups", "reroll_start_fraction below 1", lambda c: c.trl.reroll_start_fraction < 1),
    ("trl.replay_recompute_logps", "replay_buffer_size above 0", lambda c: c.trl.replay_buffer_size),
    ("trl.ref_model_sync_steps", "sync_ref_model: true", lambda c: c.trl.sync_ref_model),
    ("trl.ref_model_mixup_alpha", "sync_ref_model: true", lambda c: c.trl.sync_ref_model),
    ("trl.num_completions_to_print", "log_completions: true", lambda c: c.trl.log_completions),
    ("trl.use_bias_correction_kl", "beta above 0", lambda c: c.trl.beta),
)


def _idle(c: MethodConfig) -> Iterator[str]:
    """Keys that have no effect on full completions, as the beginning of a sentence, and why."""
    trl = c.trl
    given = sorted(key for key in trl.model_fields_set if key.startswith("vllm_"))
    if not trl.use_vllm:
        idle, reason = [key for key in given if key != "vllm_guided_decoding_regex"], "without use_vllm: true"
    elif c.uses_server:
        idle, reason = [key for key in given if key == "vllm_enable_sleep_mode"], "without vllm_mode: colocate"
    else:
        of_servers = ("vllm_server_", "vllm_sync_interval", "vllm_logp_diff_")
        idle, reason = [key for key in given if key.startswith(of_servers)], "with vllm_mode: colocate"
    if idle:
        yield f"{', '.join(f'trl.{key}' for key in idle)}: no effect {reason}"
    bounds = ", ".join(f"trl.{key}" for key in (_CAP, _FLOOR) if getattr(trl, key) is not None)
    by_groups = trl.multi_objective_aggregation == _AGGREGATION
    skips = "skip_zero_advantage_batches" in trl.model_fields_set and trl.skip_zero_advantage_batches
    without_workers = "reward_timeout" in trl.model_fields_set and trl.reward_num_workers == 1
    rows: tuple[tuple[object, str], ...] = (
        (trl.use_vllm and trl.vllm_importance_sampling_correction is False and bounds,
         f"{bounds}: no effect with trl.vllm_importance_sampling_correction: false"),
        (trl.use_data_producer, "trl.use_data_producer has no effect: generation does not use a data producer"),
        (trl.use_liger_loss, "trl.use_liger_loss has no effect: the log-probabilities are computed in chunks"),
        (by_groups and trl.scale_rewards not in (None, True, "group"),
         f"trl.scale_rewards has no effect with {_AGGREGATION} (rl: gdpo), which divides by standard deviations"),
        (trl.streaming_partial_batch and trl.reward_num_workers > 1,
         "trl.streaming_partial_batch has no effect with reward_num_workers above 1, called for one prompt at a time"),
        (without_workers, "trl.reward_timeout has no effect without reward_num_workers above 1"),
        (trl.use_vllm and c.vllm.serve_module is not None,
         "vllm.serve_module has no effect: vLLM's OpenAI server is always used"),
        (skips and (c.deepspeed is not None or c.fp16),
         "trl.skip_zero_advantage_batches: true has no effect with deepspeed or fp16: true, which need all gradients"),
        (c.train_on_inputs, "train_on_inputs: true has no effect on full completions of prompts"),
        (c.sample_packing, "sample_packing: true has no effect on full completions of prompts"),
        (c.uses_server and c.adapter is not None and trl.vllm_lora_sync is False,
         "trl.vllm_lora_sync: false has no effect: adapters are always sent to vLLM unmerged"),
        ("vllm" in c.model_fields_set and not trl.use_vllm, "vllm: has no effect without trl.use_vllm: true"),
    )  # fmt: skip
    yield from (message for is_idle, message in rows if is_idle)


def _rewards(config: MethodConfig, names: list[str], always: tuple[str, ...]) -> Iterator[str]:
    """Problems with the rewards `names`; the method includes `always`."""
    if not names and not config.trl.environment_factory:
        yield (
            "rl: grpo needs trl.reward_funcs=[rewards.accuracy], or another import path, folders or Hub ids of reward "
            "models, or feature_matching."
        )
    if len(set(names)) < len(names):
        advice = " With rl: ebft, feature_matching is always included." if always else ""
        yield f"trl.reward_funcs: {', '.join(names)} contains a duplicate. Remove it.{advice}"
    for name in config.trl.reward_funcs or []:
        if "/" in name:
            problem = reward_problem(name)
            if problem is not None:
                yield problem
        elif name not in (FEATURE_MATCHING, *((VERIFY, ENVIRONMENT) if config.nemo_gym_enabled else ())):
            find_function("trl.reward_funcs", name)


def _load_interactive(config: MethodConfig) -> dict[str, Any]:
    """Return the tools and environments of a config by the trainer's argument. Raises ConfigError."""
    loaded: dict[str, Any] = {}
    for key in rules.INTERACTIVE:
        names, find = getattr(config.trl, key), lambda name, key=key: find_function(f"trl.{key}", name)
        if isinstance(names, dict):
            loaded[key] = {environment: find(name) for environment, name in names.items()}
        elif names:
            loaded[key] = find(names) if isinstance(names, str) else [find(name) for name in names]
    return loaded
