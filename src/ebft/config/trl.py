"""The section `trl:`, read by structured mode and GRPO. With other methods it has no effect and gives a warning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ebft.config.options import MAX_TEMPERATURE, MAX_TOKENS, MIN_TEMPERATURE
from ebft.config.section import Section, section_of_options, with_help

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


@with_help
@dataclass
class RolloutOptions:
    """Options for generating rollouts that the trainers add to TRL's arguments."""

    vllm_mode: Literal["server", "managed", "colocate"] = "server"
    """Where vLLM runs if use_vllm is true. server: a server started with `ebft vllm-serve`; managed: a server that
    training starts, monitors and stops; colocate: in the training process."""
    vllm_sync_interval: Annotated[int, Field(ge=1)] = 1
    """Number of optimizer steps between weight updates of vLLM."""
    vllm_logp_diff_warn: Annotated[float | None, Field(gt=0)] = None
    """Warn if the log-probabilities that the vLLM server reports for a batch differ from the trainer's, for the same
    weights, by more than this number of nats on average. If unset, at least 0.05, more if dtypes or quantisation cause
    larger differences before training."""
    vllm_logp_diff_stop: Annotated[float | None, Field(gt=0)] = None
    """Stop training if this difference exceeds this number of nats. If unset, at least 0.2, more if dtypes or
    quantisation cause larger differences before training."""
    async_prefetch: bool = False
    """Generate the next batches while training on the current one (vllm_mode: server or managed)."""
    prefetch_depth: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of generation batches to prefetch with async_prefetch."""
    replay_buffer_size: Annotated[int, Field(ge=0)] = 0
    """Number of prompt groups with a training signal to keep, which replace groups whose advantages are all zero in
    later batches; 0 disables it."""
    replay_recompute_logps: bool = True
    """Compute the old policy's log-probabilities of replayed completions with the current weights; false: use those of
    the weights they were sampled from."""
    reroll_start_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of training after which prompts without a rewarded completion are sampled again, in place of other
    prompts; 1 disables it."""
    reroll_max_groups: Annotated[int, Field(ge=1)] = 1
    """Maximum number of prompts per batch to replace by prompts to sample again."""
    reward_num_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of processes that call reward functions, one prompt group at a time, each in its main thread, where
    signal.alarm can be used. 1: the training process calls them with all completions."""
    reward_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Time limit in seconds of a reward function for the completions of one prompt, with reward_num_workers above 1.
    They get no reward from it if it takes longer."""
    streaming_partial_batch: bool = False
    """Call reward functions with streaming_min_groups prompt groups at a time instead of all completions of a
    generation step. The feature-matching reward and log-probabilities are always computed in parts."""
    streaming_min_groups: Annotated[int, Field(ge=1)] = 1
    """Number of prompt groups per call of a reward function with streaming_partial_batch."""
    skip_zero_advantage_batches: bool = True
    """Skip the forward and backward pass of micro-batches whose advantages are all zero."""


if TYPE_CHECKING:

    class _Rollouts(RolloutOptions, Section): ...

else:
    _Rollouts = section_of_options(RolloutOptions)


class SamplingKeys(Section):
    """How completions are sampled."""

    num_generations: Annotated[int, Field(ge=2, le=MAX_TOKENS)] = 8
    """Number of completions per prompt. If unset, ebft.n_samples_per_prompt where the config has it."""
    generation_batch_size: Count | None = None
    """Number of completions per generation step, over all processes. If unset, the completions of one optimizer
    step."""
    max_completion_length: Count = Field(256, description="Maximum number of tokens in a completion.")
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 0.7
    """Sampling temperature, also applied when computing the log-probabilities of completions."""
    top_p: Probability | None = Field(None, description="Cumulative probability kept by nucleus (top-p) sampling.")
    top_k: Annotated[int, Field(ge=0)] | None = Field(None, description="Number of tokens kept by top-k sampling.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum probability of a token, relative to the most likely token."""
    repetition_penalty: Positive | None = Field(None, description="Penalty on tokens that have already appeared.")
    generation_kwargs: dict[str, Any] | None = None
    """Additional sampling parameters of vLLM, such as stop_token_ids."""
    chat_template_kwargs: dict[str, Any] | None = None
    """The same as chat_template_kwargs of the config."""
    vllm_guided_decoding_regex: str | None = None
    """Regular expression that completions must match (requires vLLM)."""


class _OtherKeys(_Rollouts):
    """The keys of `trl:` that are not about sampling."""

    # How completions are generated and logged.
    use_vllm: bool = False
    """Generate completions with vLLM instead of the policy in the training process."""
    vllm_server_host: str | None = Field(None, description="Host of the vLLM server. If unset, vllm.host.")
    vllm_server_port: Port | None = Field(None, description="Port of the vLLM server. If unset, vllm.port.")
    vllm_server_timeout: Positive | None = None
    """Timeout in seconds for the server to start and for its responses. If unset, 240, and 600 for the start of a
    server that ebft starts itself."""
    vllm_lora_sync: bool | None = None
    """No effect: adapters are always sent to vLLM through the file system."""
    vllm_enable_sleep_mode: bool | None = None
    """Release vLLM's memory while it is idle (vllm_mode: colocate)."""
    use_data_producer: bool | None = None
    """No effect: generation and prefetching do not use a data producer."""
    use_liger_loss: bool | None = None
    """No effect: log-probabilities are computed in chunks, without the logits of all tokens in memory."""
    log_completions: bool | None = None
    """Write all completions of training to rollouts.jsonl in output_dir, as log_rollouts: all does, and log some of
    them to the console and the tracker."""
    num_completions_to_print: Count | None = Field(None, description="Number of completions to print per step.")
    # Rewards in addition to the feature-matching reward.
    reward_funcs: list[str] | None = None
    """Reward functions, as import paths, or reward models, as folders (with a slash, such as ./reward) or Hub ids."""
    reward_weights: list[float] | None = None
    """Weights of the reward functions. With `rl: ebft`, the first is that of feature matching."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] | None = None
    """Whether several rewards are summed before or after normalisation."""
    # The clipped policy-gradient loss and its corrections.
    beta: Annotated[float, Field(ge=0)] | None = Field(None, description="Coefficient of the KL penalty (0 if unset).")
    num_iterations: Count | None = Field(None, description="Number of updates per generated batch (1 if unset).")
    epsilon: Positive | None = Field(None, description="Lower clipping bound of the probability ratio (0.2 if unset).")
    epsilon_high: Positive | None = None
    """Upper clipping bound of the probability ratio (epsilon if unset). With loss_type: cispo, the largest ratio itself
    (5 if unset)."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "grpo"
    """Formulation and normalisation of TRL's policy loss."""
    scale_rewards: bool | Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the rewards over the group (group or true) or the batch (batch),
    or do not scale them (none or false). If unset, group for rl: grpo and for ebft.advantage_estimator: group_norm, and
    none otherwise."""
    mask_truncated_completions: bool | None = Field(None, description="Exclude truncated completions from the loss.")
    vllm_importance_sampling_correction: bool | None = None
    """Correct for differences between the token probabilities of vLLM and of the trainer (true if unset)."""
    importance_sampling_level: Literal["token", "sequence"] | None = None
    """Level of the probability ratio: per token or per sequence."""
    vllm_importance_sampling_mode: (
        Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"] | None
    ) = None
    """Level of the vLLM importance sampling correction, and whether ratios above the cap, or below the floor, are
    masked or truncated (sequence_mask if unset)."""
    vllm_importance_sampling_cap: Positive | None = None
    """Cap of the ratio in the vLLM importance sampling correction (3 if unset)."""
    vllm_importance_sampling_clip_min: Positive | None = None
    """Floor of the ratio in the vLLM importance sampling correction (none if unset)."""
    off_policy_mask_threshold: Positive | None = None
    """Divergence above which off-policy sequences are excluded from the loss."""
    use_bias_correction_kl: bool | None = None
    """Multiply the KL penalty by the importance ratio, which makes its gradient that of the reverse KL divergence, also
    for on-policy samples. TRL's default is true."""
    sync_ref_model: bool | None = None
    """Periodically update the reference model with the weights of the policy."""
    ref_model_mixup_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the policy in updates of the reference model."""
    ref_model_sync_steps: Count | None = None
    """Number of steps between updates of the reference model."""
    # Code of the user that takes part in rollouts, by import path (module.name).
    tools: list[str] | None = None
    """Functions that the model can call between its turns (rl: grpo, prompts as messages, a chat template with tools).
    Their arguments, types and docstrings are presented to the model."""
    environment_factory: str | dict[str, str] | None = None
    """Class, or function that creates an environment: its methods are tools, `reset(**row)` starts a rollout and
    `get_reward()`, if defined, is a reward. With a mapping, the column `environment` of a row selects one."""
    max_tool_calling_iterations: Count | None = None
    """Maximum number of turns with tool calls in a rollout (no limit if unset)."""
    rollout_func: str | None = None
    """Function (prompts, trainer) that generates all rollouts: a dict of prompt_ids, completion_ids, logprobs and,
    optionally, env_mask and columns for reward functions. `trainer.sample` samples completions."""


class TRLSection(SamplingKeys, _OtherKeys):
    """The section `trl:`: generation and policy optimisation in structured mode."""
