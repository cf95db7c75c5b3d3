"""GRPO (`rl: grpo`): completions of prompts with user-defined reward functions, based on TRL's trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ebft.catalog import as_folder, is_gguf
from ebft.config import rules
from ebft.config.options import DropoutOption, RewardOptions, SharedPrefixOption
from ebft.config.section import option_names
from ebft.config.trl import RolloutOptions
from ebft.errors import ConfigError
from ebft.methods import grpo_rules, nemo_gym
from ebft.methods.ebft import warn_of_reward
from ebft.methods.grpo_rules import FEATURE_MATCHING
from ebft.methods.method import HEALTHY_ROLLOUTS, EvaluationSampling, Method
from ebft.nemo_gym.keys import NemoGymKeys

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig
    from ebft.data.load import LoadedRows
    from ebft.methods.views import RowView
    from ebft.run.checks import Machine

# Keys of `trl:` that are arguments of TRL's GRPOConfig, under the same or another name.
_SAME_NAME = (
    *option_names(RolloutOptions),
    "use_vllm",
    "num_generations",
    "generation_batch_size",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    "max_tool_calling_iterations",
    "beta",
    "num_iterations",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "scale_rewards",
    "mask_truncated_completions",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "reward_weights",
    "multi_objective_aggregation",
    "vllm_server_timeout",
    "vllm_enable_sleep_mode",
    "log_completions",
    "num_completions_to_print",
)
_OTHER_NAME = {
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


class GRPO(Method):
    """RolloutGRPOTrainer on rows of prompts."""

    name = "rl: grpo"
    tag = "grpo"
    rows = "prompts"
    keys = NemoGymKeys
    needs_reference = False
    phases = {"rollouts": "_generate", "rewards and features": "_calculate_rewards"}
    healthy = {"grad_norm": (None, 1.0), **HEALTHY_ROLLOUTS}
    own_rewards: tuple[str, ...] = ()  # rewards that are always included

    def summary(self, config: RunConfig) -> str:
        names = [*(config.trl.reward_funcs or []), *grpo_rules.environments(config)]
        return f"GRPO on the rewards {', '.join(f'`{name}`' for name in names)}"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        yield from nemo_gym.conflicts(config)
        file = config.model_name
        if is_gguf(file) and config.trl.use_vllm and config.trl.vllm_mode != "server":
            yield f"{file} is a GGUF file, which cannot be served with vLLM here. {as_folder(file)}"
        ours, theirs = config.vllm.port, config.trl.vllm_server_port
        if config.manages_server and "port" in config.vllm.model_fields_set and theirs not in (None, ours):
            yield (
                f"vllm.port: {ours} and trl.vllm_server_port: {theirs} differ: with vllm_mode: managed, the server "
                "listens on the first and the trainer connects to the second. Keep one of them."
            )

    def resolve(self, config: RunConfig) -> None:
        """One warning for each key that has no effect on full completions."""
        nemo_gym.resolve(config)
        grpo_rules.warn_of_idle_keys(config)
        if config.torch_compile:
            config.torch_compile = False
            warnings.warn(rules.compiled(rules.in_config, "structured mode and GRPO"), stacklevel=2)
        self.warn_of_idle_options(config)
        if FEATURE_MATCHING in self._reward_names(config):
            warn_of_reward(config)

    def warn_of_idle_options(self, config: RunConfig) -> None:
        """One warning for all unused keys of `ebft:`."""
        read = set(option_names(DropoutOption, SharedPrefixOption))
        if FEATURE_MATCHING in (config.trl.reward_funcs or []):
            read |= set(option_names(RewardOptions))
        idle = ", ".join(f"ebft.{key}" for key in sorted(config.ebft.model_fields_set - read))
        if idle:
            warnings.warn(f"{idle}: no effect with {self.name} and these rewards.", stacklevel=2)

    def problems(self, config: RunConfig) -> Iterator[str]:
        names = self._reward_names(config)
        yield from grpo_rules.batches(config)
        yield from grpo_rules.rewards(config, names, self.own_rewards)
        yield from grpo_rules.rollouts(config)
        yield from grpo_rules.interaction(config, FEATURE_MATCHING in names)
        yield from grpo_rules.processes(config)

    def problems_here(self, config: RunConfig, machine: Machine) -> Iterator[str]:
        found = rules.full_weights(
            config.uses_server, config.adapter is not None, machine.has_accelerator, rules.in_config
        )
        if found:
            yield found
        yield from nemo_gym.problems_here(config, machine)

    def _reward_names(self, config: RunConfig) -> list[str]:
        return [*self.own_rewards, *(config.trl.reward_funcs or [])]

    def held_out_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return ("reward", "loss")

    def sampling(self, config: RunConfig) -> EvaluationSampling:
        trl = config.trl
        given = ", ".join(f"trl.{name}" for name in rules.INTERACTIVE if getattr(trl, name))
        if given:
            raise ConfigError(
                f"ebft evaluate samples completions without {given}. Hold out rows in training instead (test_datasets "
                "or val_set_size, with eval_strategy)."
            )
        options = {name: getattr(trl, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        return EvaluationSampling(
            trl.num_generations,
            trl.temperature,
            {name: value for name, value in options.items() if value is not None},
            dict(trl.generation_kwargs or {}),
            trl.vllm_guided_decoding_regex,
        )

    def samples_per_group(self, config: RunConfig) -> int:
        return config.trl.num_generations

    def compares_features(self, config: RunConfig) -> bool:
        return FEATURE_MATCHING in self._reward_names(config)

    def check_rows(self, config: RunConfig, rows: LoadedRows) -> None:
        grpo_rules.check_reward_columns(config, rows.train)
        grpo_rules.check_reward_templates(config, rows.train)
        if config.nemo_gym_enabled:
            nemo_gym.check_rows(config, rows.train, rows.evaluation)

    def row_view(self, config: RunConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.methods.views import PromptView

        compares = self.compares_features(config)
        given = ", ".join(f"trl.{name}" for name in rules.INTERACTIVE if getattr(config.trl, name))
        note = f"shown without what {given} adds to prompts in training" if given else None
        return PromptView(tokenizer, config.chat_template_kwargs, compares, note=note, **self.cross_entropy(config))

    def cross_entropy(self, config: RunConfig) -> dict[str, Any]:
        """The options of a cross-entropy on references, if the method has one."""
        return {}

    def services(self, config: RunConfig) -> AbstractContextManager[None]:
        if not config.nemo_gym_enabled:
            return nullcontext()
        from ebft.nemo_gym.client import started_servers

        return started_servers(config, config.output_dir)

    def steps_per_epoch(self, config: RunConfig, machine: Machine, rows: int) -> int:
        """TRL repeats each prompt `num_generations` times and each generation batch `num_iterations` times."""
        trl, accumulation = config.trl, config.gradient_accumulation_steps
        samples_per_micro_step = config.micro_batch_size * machine.processes
        completions = trl.generation_batch_size or samples_per_micro_step * accumulation
        prompts = max(1, completions // trl.num_generations)
        micro_steps = rows // prompts * (completions // samples_per_micro_step) * (trl.num_iterations or 1)
        return max(1, math.ceil(micro_steps / accumulation))

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        trl, vllm = config.trl, config.vllm
        kwargs = {key: getattr(trl, key) for key in _SAME_NAME}
        kwargs |= {name: getattr(trl, key) for key, name in _OTHER_NAME.items()}
        kwargs["vllm_server_host"], kwargs["vllm_server_port"] = config.server_address
        if trl.use_vllm and not config.uses_server:
            kwargs["vllm_gpu_memory_utilization"] = vllm.gpu_memory_utilization
            kwargs["vllm_max_model_length"] = vllm.max_model_len
            kwargs["vllm_tensor_parallel_size"] = vllm.tensor_parallel_size
        kwargs |= {name: getattr(config.ebft, name) for name in self.own_options()}
        if config.eval_batch_size is None:
            groups = math.ceil(config.micro_batch_size / trl.num_generations)
            kwargs["per_device_eval_batch_size"] = groups * trl.num_generations  # whole groups
        return {name: value for name, value in kwargs.items() if value is not None}

    def own_options(self) -> list[str]:
        """The keys of `ebft:` that are passed to its training arguments."""
        return option_names(DropoutOption, SharedPrefixOption)

    def arguments_class(self) -> type:
        from ebft.structured import RolloutGRPOConfig

        return RolloutGRPOConfig

    def trainer_class(self) -> type:
        from ebft.structured import RolloutGRPOTrainer

        return RolloutGRPOTrainer

    def build_trainer(self, config: RunConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.structured.reward_funcs import load_reward_funcs

        built_in, agents = nemo_gym.rewards_and_agents(config)
        return self.trainer_class()(
            model=model,
            reward_funcs=load_reward_funcs(config.trl, config.ebft, model, tokenizer, built_in),
            agents=agents,
            server_failure=lambda: server.failure if server is not None else None,
            **grpo_rules.load_interactive(config),
            **common,
        )


_AGGREGATION = "normalize_then_sum"


class GDPO(GRPO):
    """GRPO with `trl.multi_objective_aggregation: normalize_then_sum`."""

    name = "rl: gdpo"
    tag = "gdpo"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        given = config.trl.multi_objective_aggregation
        if given not in (None, _AGGREGATION):
            yield f"trl.multi_objective_aggregation: {given} contradicts rl: gdpo. Remove it, or set rl: grpo."

    def resolve(self, config: RunConfig) -> None:
        super().resolve(config)
        config.trl.multi_objective_aggregation = _AGGREGATION
