"""Every EBFT option, declared once: type, default, bounds and help.

The options are dataclasses, which the trainers' config classes inherit; the YAML section `ebft:`, `--help` and the
reference page are made of the same declarations.
"""

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from ebft.config.section import Section, option_names, section_of_options, with_help
from ebft.config.validation_errors import raise_config_error
from ebft.errors import ConfigError

MAX_TOKENS = 1_000_000
MIN_TEMPERATURE = 1e-3  # below it logits divided by the temperature overflow
Fraction = Annotated[float, Field(ge=0, le=1)]


@with_help
@dataclass
class RewardOptions:
    """The feature network and the reward made of it."""

    feature_layers: Annotated[
        list[Fraction],
        Field(
            min_length=1,
            strict=False,
            description="Depths of the hidden states that make a feature, as fractions of the number of layers "
            "(0 is the embedding output, 1 the last layer).",
        ),
    ] = field(default_factory=lambda: [0.25, 0.5, 0.75])
    embed_method: Annotated[
        Literal["last_token", "mean_pooling", "completion_mean", "concat"],
        Field(description="How the token features of a block are pooled into one embedding."),
    ] = "last_token"
    use_whitening: Annotated[
        bool, Field(description="Whiten the embeddings by the second moment of the samples before the reward.")
    ] = False
    whitening_space: Annotated[
        Literal["feature", "sample"],
        Field(description="Whiten in feature space (the paper's formula) or between samples (the authors' code)."),
    ] = "feature"
    alignment_coef: Annotated[
        float, Field(ge=0, description="Weight of the alignment term (similarity with the reference) in the reward.")
    ] = 1.0
    diversity_coef: Annotated[
        float, Field(ge=0, description="Weight of the diversity penalty (similarity between samples) in the reward.")
    ] = 1.0
    feature_device: Annotated[
        str | None,
        Field(description="Device of the frozen copy in full fine-tuning (cuda:1, cpu); unset is the model's own."),
    ] = None


@with_help
@dataclass
class DropoutOption:
    """What every trainer reads."""

    disable_dropout: Annotated[
        bool, Field(description="Train without dropout, as the rollouts are sampled without it.")
    ] = True


@with_help
@dataclass
class FeatureOptions(RewardOptions, DropoutOption):
    """What the trainers of both modes share: the reward, and what else is in the loss."""

    ce_coef: Annotated[
        float, Field(ge=0, description="Weight of the cross-entropy on the reference text in the loss.")
    ] = 0.0


@with_help
@dataclass
class StridedOptions(FeatureOptions):
    """Everything the strided trainer needs to know beyond the usual training arguments."""

    stride: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="Tokens between two anchors of a document.")] = 8
    context_length: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_TOKENS,
            description="Fewest tokens before the first anchor of a document; a rollout sees the whole prefix.",
        ),
    ] = 8
    generate_max_len: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="Tokens sampled at each anchor.")] = 8
    n_samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="Rollouts sampled at each anchor.")] = 4
    temperature: Annotated[
        float,
        Field(
            ge=0, description="Sampling temperature; rollouts are scored at it too. 0 is greedy, for evaluation only."
        ),
    ] = 0.6
    top_p: Annotated[float, Field(gt=0, le=1, description="Share of probability kept by nucleus sampling.")] = 1.0
    min_completion_prefix: Annotated[
        int,
        Field(ge=0, le=MAX_TOKENS, description="Completion tokens before the first anchor of a prompt/completion row."),
    ] = 0
    rl_coef: Annotated[float, Field(ge=0, description="Weight of the policy-gradient term in the loss.")] = 1.0
    advantage_estimator: Annotated[
        Literal["rloo", "group_norm", "reinforce"],
        Field(description="How the rewards of one anchor's rollouts become advantages."),
    ] = "rloo"
    rloo_baseline: Annotated[
        Literal["independent", "mean"],
        Field(
            description="Leave-one-out baseline: free of sample j also in the diversity terms, or the plain mean "
            "of the other rewards."
        ),
    ] = "independent"
    rollout_tokens_per_pass: Annotated[
        int | None,
        Field(
            ge=1,
            description="Rollout tokens in one forward at most, for when n_samples_per_prompt * blocks * "
            "generate_max_len do not fit into memory: more take several, with the same loss and gradient; unset takes "
            "all at once.",
        ),
    ] = None
    single_pass: Annotated[
        bool | None,
        Field(
            description="Train on what was computed while sampling, instead of computing it again; unset: on CPU. Not "
            "with gradient checkpointing, rollout_tokens_per_pass, dropout or FSDP."
        ),
    ] = None
    grad_norms_every: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_TOKENS,
            description="Log the gradient norms of the two terms of the loss, ebft/rl_grad_norm and "
            "ebft/ce_grad_norm, every so many optimizer steps; 0 is never. Such a step takes a backward pass more for "
            "each term, and memory for two float32 gradients. Not with FSDP, DeepSpeed, fp16 or reentrant gradient "
            "checkpointing.",
        ),
    ] = 0


@with_help
@dataclass
class ThinkingOption:
    """What both modes read where they turn a reference into tokens."""

    mask_thinking_ce: Annotated[
        bool,
        Field(
            description="Leave thinking blocks (<think>...</think> and the like) of a reference out of the "
            "cross-entropy."
        ),
    ] = False


@with_help
@dataclass
class StructuredOptions:
    """What only structured mode reads."""

    adaptive_max_tokens: Annotated[
        bool,
        Field(
            description="Limit each completion by the length of its own reference too, not by "
            "max_completion_length alone (structured mode)."
        ),
    ] = True
    gt_length_multiplier: Annotated[
        float, Field(ge=0.1, description="That limit, in lengths of the reference in tokens (structured mode).")
    ] = 1.5
    gt_length_floor: Annotated[
        int, Field(ge=1, le=MAX_TOKENS, description="That limit is never below so many tokens (structured mode).")
    ] = 64


@with_help
@dataclass
class ModeOption:
    """Which of the two modes."""

    mode: Annotated[
        Literal["structured", "strided"],
        Field(description="structured: full completions of prompts. strided: short rollouts along each document."),
    ] = "structured"


@with_help
@dataclass
class EBFTOptions(StructuredOptions, StridedOptions, ThinkingOption, ModeOption):
    """Every option of the section `ebft:`."""


if TYPE_CHECKING:

    class EBFTSection(EBFTOptions, Section):
        """The section `ebft:`: its options, and `model_fields_set`, those that a config gives."""

else:
    EBFTSection = section_of_options(EBFTOptions, "EBFTSection")


def options_from(options: type, given: dict[str, Any]) -> Any:
    """The `options` made of `given`, defaults for the rest; ConfigError names an unknown or wrong one."""
    section = section_of_options(options)
    try:
        return section.model_validate(given)
    except ValidationError as error:
        raise_config_error(error, section)


def validate_options(options: type, obj: Any) -> None:
    """Check the attributes of `obj` against types and bounds; ConfigError names the first wrong option.

    Values that pydantic converts (an int for a float, a tuple for a list) are written back to `obj`.
    """
    checked = options_from(options, {name: getattr(obj, name) for name in option_names(options)})
    for name in option_names(options):
        setattr(obj, name, getattr(checked, name))


def resolve_single_sample(options: Any) -> None:
    """One sample per anchor has no baseline and no pair: use `reinforce`, no diversity, and warn once."""
    if options.n_samples_per_prompt > 1:
        return
    changes = []
    if options.advantage_estimator != "reinforce":
        options.advantage_estimator = "reinforce"
        changes.append("advantage_estimator becomes reinforce")
    if options.diversity_coef != 0:
        options.diversity_coef = 0.0
        changes.append("diversity_coef becomes 0")
    if changes:
        reason = "n_samples_per_prompt: 1 leaves no other sample to compare with"
        warnings.warn(f"{reason}: {' and '.join(changes)}.", stacklevel=2)


def check_trainable(options: Any) -> None:
    """Refuse options that are fine for evaluation but carry no training signal."""
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"temperature: {options.temperature} is too close to 0 for logits to be divided by it. Set at least "
            f"{MIN_TEMPERATURE}."
        )
    if options.temperature == 0:
        raise ConfigError(
            "temperature: 0 samples the same greedy rollout every time, so no advantage is left to train on. "
            "Set temperature above 0 (the default is "
            f"{StridedOptions.temperature}); 0 is for evaluation."
        )
