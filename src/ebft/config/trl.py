"""The section `trl:`, which structured mode and GRPO read; elsewhere it has no effect, and a warning says so."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ebft.config.options import MIN_TEMPERATURE
from ebft.config.section import Section, section_of_options, with_help

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


@with_help
@dataclass
class RolloutOptions:
    """Where rollouts come from and how fresh they are: what our trainers add to TRL's own arguments."""

    vllm_mode: Annotated[
        Literal["server", "managed", "colocate"],
        Field(
            description="Where vLLM runs (use_vllm: true): server, started with `ebft vllm-serve`; managed, a server "
            "that training starts, watches and stops itself; colocate, in the trainer's own process."
        ),
    ] = "server"
    vllm_sync_interval: Annotated[
        int, Field(ge=1, description="Optimizer steps between two updates of vLLM's weights.")
    ] = 1
    async_prefetch: Annotated[
        bool, Field(description="Generate the next batches while training on this one (server and managed).")
    ] = False
    prefetch_depth: Annotated[int, Field(ge=1, description="Generation batches made ahead with async_prefetch.")] = 1
    skip_zero_advantage_batches: Annotated[
        bool, Field(description="Skip forward and backward of micro-batches whose advantages are all zero.")
    ] = True


class SamplingKeys(Section):
    """How completions are sampled."""

    num_generations: Annotated[int, Field(ge=2)] = Field(8, description="Completions per prompt.")
    generation_batch_size: Count | None = Field(
        None, description="Completions per generation step, over all processes; unset: those of one optimizer step."
    )
    max_completion_length: Count = Field(256, description="Most tokens of a completion.")
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = Field(
        0.7, description="Sampling temperature; completions are scored at it too."
    )
    top_p: Probability | None = Field(None, description="Share of probability kept by nucleus sampling.")
    top_k: Annotated[int, Field(ge=0)] | None = Field(None, description="Number of tokens kept by top-k sampling.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Tokens below this share of the most probable one are dropped."
    )
    repetition_penalty: Positive | None = Field(None, description="Penalty on tokens that appeared before.")
    generation_kwargs: dict[str, Any] | None = Field(
        None, description="Further sampling parameters of vLLM, such as stop_token_ids."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Arguments of the chat template, such as enable_thinking."
    )
    vllm_guided_decoding_regex: str | None = Field(None, description="Regular expression completions must match.")
    rollout_func: str | None = Field(None, description="Not supported: the trainer makes the rollouts.")


class PolicyLossKeys(Section):
    """The clipped policy-gradient loss and its corrections."""

    beta: Annotated[float, Field(ge=0)] | None = Field(None, description="Weight of the KL penalty (unset: 0).")
    num_iterations: Count | None = Field(None, description="Updates per generated batch (unset: 1).")
    epsilon: Positive | None = Field(None, description="Lower clipping bound of the probability ratio (unset: 0.2).")
    epsilon_high: Positive | None = Field(
        None, description="Upper clipping bound of the probability ratio (unset: as epsilon)."
    )
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = Field(
        "grpo", description="How TRL forms and normalises the policy's loss."
    )
    scale_rewards: bool | Literal["group", "batch", "none"] | None = Field(
        None,
        description="Divide rewards by their standard deviation: of the group (true or unset), of the batch, or not.",
    )
    mask_truncated_completions: bool | None = Field(None, description="Leave cut completions out of the loss.")
    vllm_importance_sampling_correction: bool | None = Field(
        None, description="Correct for vLLM's probabilities differing from the trainer's (unset: true)."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        None, description="Unit of the probability ratio."
    )
    vllm_importance_sampling_mode: (
        Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"] | None
    ) = Field(
        None, description="Unit of that correction, and what happens to ratios beyond the cap (unset: sequence_mask)."
    )
    vllm_importance_sampling_cap: Positive | None = Field(None, description="Cap of that ratio (unset: 3).")
    off_policy_mask_threshold: Positive | None = Field(
        None, description="Divergence above which a stale sequence is left out."
    )
    use_bias_correction_kl: bool | None = Field(None, description="Correct the KL penalty for stale samples.")
    sync_ref_model: bool | None = Field(None, description="Move the reference model along with the policy.")
    ref_model_mixup_alpha: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Share of the policy in that move."
    )
    ref_model_sync_steps: Count | None = Field(None, description="Steps between two such moves.")


class RewardKeys(Section):
    """Rewards beside the feature-matching reward."""

    reward_funcs: list[str] | None = Field(None, description="Import paths or hub names of reward functions.")
    reward_weights: list[float] | None = Field(None, description="Weights of those functions.")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] | None = Field(
        None, description="Order of summing and normalising several rewards."
    )
    reward_num_workers: Count | None = Field(
        None, description="Without effect: reward functions run in the training process."
    )


class RolloutServerKeys(Section):
    """Where completions come from and how fresh they are."""

    use_vllm: bool = Field(False, description="Generate with vLLM instead of the model's own generate().")
    vllm_server_host: str | None = Field(None, description="Host of the vLLM server; unset: vllm.host.")
    vllm_server_port: Port | None = Field(None, description="Port of the vLLM server; unset: vllm.port.")
    vllm_server_timeout: Positive | None = Field(
        None,
        description="Seconds to wait for the server to be up, and for its answers (unset: 240, and 600 for a "
        "server that ebft itself starts to be up).",
    )
    vllm_lora_sync: bool | None = Field(
        None,
        description="Send the adapter to vLLM through the file system, which is how adapters are always sent here.",
    )
    vllm_enable_sleep_mode: bool | None = Field(None, description="Free vLLM's memory while it waits (colocate).")
    use_data_producer: bool | None = Field(
        None, description="Without effect: every run generates and prefetches in the same way."
    )
    streaming_partial_batch: bool | None = Field(None, description="Without effect: groups are scored one by one.")
    streaming_min_groups: Count | None = Field(None, description="Without effect, like streaming_partial_batch.")
    replay_buffer_size: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Not supported above 0: there is no replay buffer."
    )
    replay_recompute_logps: bool | None = Field(None, description="Without effect: there is no replay buffer.")
    reroll_start_fraction: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Not supported below 1: failed prompts are not tried again."
    )
    reroll_max_groups: Count | None = Field(None, description="Without effect: failed prompts are not tried again.")
    log_completions: bool | None = Field(None, description="Log sample completions.")
    num_completions_to_print: Count | None = Field(None, description="Completions printed per step.")


if TYPE_CHECKING:

    class _Rollouts(RolloutOptions, Section): ...

else:
    _Rollouts = section_of_options(RolloutOptions)


class TRLSection(SamplingKeys, PolicyLossKeys, RewardKeys, RolloutServerKeys, _Rollouts):
    """The section `trl:`: generation and policy optimisation in structured mode."""
