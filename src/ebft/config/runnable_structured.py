"""What structured mode and GRPO cannot train with, told before anything is loaded."""

from collections.abc import Iterator
from importlib.util import find_spec

from ebft.config.imports import find_function
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError

_OWN_ROLLOUTS = "write a trl.GRPOTrainer script with ebft.FeatureMatchingReward among its reward functions"

# Keys of `trl:` that change the training and are not here: (key, value at which it is off, way out).
_NOT_HERE = (
    ("rollout_func", None, f"Remove it, or {_OWN_ROLLOUTS}."),
    ("replay_buffer_size", 0, "Remove it; scale_rewards and a higher temperature keep more groups with a signal."),
    ("reroll_start_fraction", 1.0, "Remove it; more epochs meet the same prompts again."),
)


def check_structured(config: RunConfig) -> None:
    """Raise a ConfigError that lists everything about `config` that structured mode or GRPO cannot honour."""
    found = [message for rule in (_unsupported, _batches, _rewards, _rollouts, _processes) for message in rule(config)]
    if found:
        raise ConfigError("\n".join(found))


def _unsupported(config: RunConfig) -> Iterator[str]:
    for key, off, way_out in _NOT_HERE:
        value = getattr(config.trl, key)
        if value not in (None, off):
            yield f"trl.{key}: {value!r} is not supported. {way_out}"


def _batches(config: RunConfig) -> Iterator[str]:
    trl, samples = config.trl, config.micro_batch_size * config.gradient_accumulation_steps
    if trl.generation_batch_size is None and samples % trl.num_generations:
        yield (
            f"micro_batch_size {config.micro_batch_size} times gradient_accumulation_steps "
            f"{config.gradient_accumulation_steps} are {samples} completions, which trl.num_generations "
            f"{trl.num_generations} does not divide: every prompt needs all of its completions in one step. Change one "
            "of them."
        )
    per_process = config.eval_batch_size
    if per_process is not None and per_process % trl.num_generations:
        yield f"eval_batch_size {per_process} is no multiple of trl.num_generations {trl.num_generations}. Change one."


def _rewards(config: RunConfig) -> Iterator[str]:
    funcs, weights = config.trl.reward_funcs or [], config.trl.reward_weights
    if config.rl == "grpo" and not funcs:
        yield (
            "rl: grpo needs trl.reward_funcs: import paths such as rewards.accuracy, names of reward models, or "
            "feature_matching."
        )
    rewards = [*(["feature_matching"] if config.rl == "ebft" else []), *funcs]
    if len(set(rewards)) < len(rewards):
        yield f"trl.reward_funcs: {', '.join(rewards)} names a reward twice. With rl: ebft feature_matching is there."
    for name in funcs:
        if name != "feature_matching" and "/" not in name:
            find_function("trl.reward_funcs", name)
    if weights is not None and len(weights) != len(rewards):
        yield f"trl.reward_weights has {len(weights)} weights for {len(rewards)} rewards: {', '.join(rewards)}."


def _rollouts(config: RunConfig) -> Iterator[str]:
    trl = config.trl
    if trl.async_prefetch and not config.uses_server:
        yield (
            "trl.async_prefetch generates on a server while training goes on. Set trl.use_vllm: true with "
            "trl.vllm_mode: server or managed, or remove it."
        )
    if trl.vllm_guided_decoding_regex is not None and not trl.use_vllm:
        yield "trl.vllm_guided_decoding_regex needs vLLM. Set trl.use_vllm: true, or remove it."
    if trl.sync_ref_model and (not trl.beta or config.adapter is not None):
        yield (
            "trl.sync_ref_model moves a reference model, which there is with trl.beta above 0 and without an adapter "
            "only. Remove it."
        )
    if trl.use_vllm and not config.uses_server and find_spec("vllm") is None:
        yield (
            "trl.vllm_mode: colocate needs vLLM in this environment: pip install vllm. Or set vllm_mode: server or "
            "managed, which take vLLM from an environment of its own (vllm.python)."
        )
    if config.uses_server and config.adapter is not None and config.lora_modules_to_save:
        yield (
            "lora_modules_to_save: vLLM loads no adapter with whole modules in it. Remove it, or set trl.use_vllm: "
            "false."
        )


def _processes(config: RunConfig) -> Iterator[str]:
    if config.fsdp:
        yield "fsdp is not supported with whole completions. Remove it: several processes use DDP, or set deepspeed."
    if config.group_by_length:
        yield "group_by_length would tear groups of completions apart. Remove it."
