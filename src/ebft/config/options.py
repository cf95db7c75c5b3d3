"""All EBFT options, each declared once with its type, default, bounds and help text.

The options are dataclasses that the trainers' config classes inherit. The YAML section `ebft:`, `--help` and the
reference page are generated from the same declarations.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from pydantic import AfterValidator, Field

from ebft.config.section import Section, section_of_options, with_help

MAX_TOKENS = 1_000_000
MIN_TEMPERATURE = 1e-3  # dividing logits by a smaller temperature overflows
MAX_TEMPERATURE = 100  # at larger ones, all tokens are equally likely
Fraction = Annotated[float, Field(ge=0, le=1)]


def _distinct(values: list[float]) -> list[float]:
    repeated = [value for place, value in enumerate(values) if value in values[:place]]
    if repeated:
        raise ValueError(f"feature_layers: {repeated[0]} is repeated; expected distinct values.")
    return values


# Each is a function in the table POOLING of `ebft.features`.
EmbedMethod = Literal["last_token", "mean_pooling", "completion_mean", "concat"]


@with_help
@dataclass
class RewardOptions:
    """Options of the feature network and of the reward computed from its features."""

    feature_layers: Annotated[list[Fraction], Field(min_length=1, strict=False), AfterValidator(_distinct)] = field(
        default_factory=lambda: [0.25, 0.5, 0.75]
    )
    """Layers whose hidden states are concatenated into the features, as fractions of the network depth (0 is the
    embedding output, 1 the last layer)."""
    embed_method: EmbedMethod = "last_token"
    """How the token features of a block are pooled into one embedding."""
    use_whitening: bool = False
    """Whiten the embeddings with the second-moment matrix of the samples before computing the reward."""
    whitening_space: Literal["feature", "sample"] = "feature"
    """Space in which embeddings are whitened: feature (the paper's formula) or sample (the authors' code)."""
    alignment_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the alignment term (similarity with the reference) in the reward."""
    diversity_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the diversity penalty (similarity between samples) in the reward."""
    feature_device: str | None = None
    """Device of the frozen feature network in full fine-tuning, for example cuda:1 or cpu. If unset, an idle second GPU
    if there is one, or else the model's device."""


class RewardOptionTypes(TypedDict, total=False):
    """The names and types of RewardOptions, for type checkers: keyword arguments of a reward function."""

    feature_layers: list[float]
    embed_method: EmbedMethod
    use_whitening: bool
    whitening_space: Literal["feature", "sample"]
    alignment_coef: float
    diversity_coef: float
    feature_device: str | None


@with_help
@dataclass
class DropoutOption:
    """Option of all trainers."""

    disable_dropout: bool = True
    """Disable dropout during training, since rollouts are sampled without dropout."""


@with_help
@dataclass
class RolloutLogOption:
    """Option of all trainers that sample rollouts."""

    log_rollouts: Literal["few", "all", "none"] = "few"
    """Rollouts that are written to rollouts.jsonl in output_dir with the terms of their rewards and their advantages,
    for `ebft show`, the dashboard and the report; they are not printed. few: two prompts or documents, with up to four
    blocks each, at about a hundred steps of the run that are evenly spread, by the main process; all: every one of
    training. log_completions: true writes all too."""


@with_help
@dataclass
class CudaGraphsOption:
    """Option of the trainers that sample in the training process."""

    cuda_graphs: bool = False
    """On CUDA, record the kernels that sample a token of all rollouts as a CUDA graph, and start them together for each
    further token. Without effect with FSDP2, ZeRO-3 or shared_prefix: false; in strided mode also with merge_rollouts
    and for models with sliding windows or running states. Experimental: not yet compared on a GPU (`make gpu` does)."""


@with_help
@dataclass
class SharedPrefixOption(CudaGraphsOption):
    """Options of the trainers of full completions."""

    shared_prefix: bool = True
    """Full completions: compute each prompt once for all its completions and its reference, in sampling and in the
    forward passes of the loss. false, or a model that strided mode does not support: generate() and TRL's padded
    rows."""


@with_help
@dataclass
class FeatureOptions(RewardOptions, DropoutOption):
    """Options shared by the trainers of both modes: the reward, the advantages and the weight of the cross-entropy."""

    ce_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy on the reference text in the loss."""
    advantage_estimator: Annotated[
        Literal["rloo", "group_norm", "grpo", "reinforce"],
        AfterValidator(lambda name: "group_norm" if name == "grpo" else name),
    ] = "rloo"
    """How advantages are computed from the rewards of the samples at one anchor or prompt. rloo: minus a leave-one-out
    baseline; group_norm (or grpo): minus the mean, divided by the standard deviation; reinforce: the reward itself."""
    rloo_baseline: Literal["independent", "mean"] = "independent"
    """Leave-one-out baseline of sample j. independent: does not depend on sample j, including through the diversity
    terms; mean: the mean of the other samples' rewards."""


@with_help
@dataclass
class StridedOptions(FeatureOptions, CudaGraphsOption):
    """Options of the strided trainer, in addition to the usual training arguments."""

    stride: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 8
    """Number of tokens between consecutive anchors of a document."""
    context_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 8
    """Minimum number of tokens before the first anchor of a document. Rollouts attend to the entire prefix."""
    generate_max_len: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 8
    """Number of tokens sampled in each rollout."""
    n_samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 4
    """Number of rollouts sampled at each anchor."""
    temperature: Annotated[
        float,
        Field(
            ge=0,
            le=MAX_TEMPERATURE,
            description="Sampling temperature, also applied when computing the log-probabilities of rollouts. "
            f"Training requires at least {MIN_TEMPERATURE}. 0 (greedy decoding) is only supported in Python, for "
            "computing a loss without training.",
        ),
    ] = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Cumulative probability kept by nucleus (top-p) sampling, also applied when computing the log-probabilities of
    rollouts."""
    min_completion_prefix: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Minimum number of completion tokens before the first anchor of a prompt/completion row."""
    stop_at_end: bool = True
    """End rollouts and references at the first token that ends a text (of the tokenizer, the generation config, or a
    turn of the chat template), so that texts have blocks up to their ends. false, as in published trainers: only blocks
    with generate_max_len reference tokens; the model then unlearns to end texts."""
    rl_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the policy-gradient term in the loss."""
    rollout_tokens_per_pass: Annotated[int | None, Field(ge=1, le=10**9)] = None
    """Maximum number of rollout tokens per forward pass. Set it if n_samples_per_prompt * blocks * generate_max_len
    tokens do not fit in memory: larger batches are processed in several passes with the same loss and gradient. If
    unset, all rollouts are processed in one pass. Not supported with FSDP2 and DeepSpeed ZeRO-3."""
    single_pass: bool | None = None
    """Reuse the computation of the sampling pass for the loss instead of running another forward pass. If unset,
    enabled on CPU only. Not supported with gradient checkpointing, rollout_tokens_per_pass, dropout, FSDP2 or
    ZeRO-3."""
    merge_rollouts: bool | None = None
    """Compute the tokens that several rollouts of an anchor begin with once instead of for each of them, with the same
    results up to rounding. This saves time and memory if the model is certain how the text continues, as at low
    temperatures. If unset, enabled on CPU only. With disable_dropout: false, the loss does not merge them."""
    log_completions: bool = False
    """Write the rollouts of every training step to rollouts.jsonl in output_dir, as log_rollouts: all does for all
    methods."""
    grad_norms_every: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Log the gradient norms of the two loss terms, ebft/rl_grad_norm and ebft/ce_grad_norm, every grad_norms_every
    optimizer steps; 0 disables it. These steps need an additional backward pass per term and memory for two float32
    gradients. Not supported with FSDP, DeepSpeed, fp16 or reentrant gradient checkpointing."""


@with_help
@dataclass
class ThinkingOption:
    """Option that both modes read when they tokenise a reference."""

    mask_thinking_ce: bool = False
    """Exclude thinking blocks (<think>...</think> and similar tags) of a reference from the cross-entropy."""


@with_help
@dataclass
class StructuredOptions:
    """Options of structured mode only."""

    adaptive_max_tokens: bool = True
    """Structured mode: limit the length of completions by the length of the longest reference of the training data, in
    addition to max_completion_length."""
    gt_length_multiplier: Annotated[float, Field(ge=0.1, le=MAX_TOKENS)] = 1.5
    """Structured mode: length limit of adaptive_max_tokens as a multiple of the length of the longest reference in
    tokens."""
    gt_length_floor: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 64
    """Structured mode: minimum length limit of adaptive_max_tokens, in tokens."""


@with_help
@dataclass
class ModeOption:
    """The mode of energy-based fine-tuning."""

    mode: Literal["structured", "strided"] = "structured"
    """structured: sample full completions of prompts. strided: sample short rollouts at regular intervals in each
    document."""


@with_help
@dataclass
class EBFTOptions(StructuredOptions, StridedOptions, SharedPrefixOption, ThinkingOption, ModeOption):
    """All options of the section `ebft:`."""


if TYPE_CHECKING:

    class EBFTSection(EBFTOptions, Section):
        """The section `ebft:`; `model_fields_set` holds the options that the config sets."""

else:
    EBFTSection = section_of_options(EBFTOptions, "EBFTSection")
