"""Every EBFT option, declared once: type, default, bounds and help.

The YAML section `ebft:`, the trainer's config class, `--help` and the reference page are all made from here.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ebft.config.messages import raise_config_error
from ebft.config.section import Section
from ebft.errors import ConfigError

MAX_TOKENS = 1_000_000
MIN_TEMPERATURE = 1e-3  # below it logits divided by the temperature overflow
Fraction = Annotated[float, Field(ge=0, le=1)]


class RewardOptions(Section):
    """The feature network and the reward made of it."""

    feature_layers: list[Fraction] = Field(
        [0.25, 0.5, 0.75],
        min_length=1,
        strict=False,
        description="Depths of the hidden states that make a feature, as fractions of the number of layers "
        "(0 is the embedding output, 1 the last layer).",
    )
    embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = Field(
        "last_token", description="How the token features of a block are pooled into one embedding."
    )
    use_whitening: bool = Field(
        False, description="Whiten the embeddings by the second moment of the samples before the reward."
    )
    whitening_space: Literal["feature", "sample"] = Field(
        "feature",
        description="Whiten in feature space (the paper's formula) or between samples (the authors' code).",
    )
    alignment_coef: float = Field(
        1.0, ge=0, description="Weight of the alignment term (similarity with the reference) in the reward."
    )
    diversity_coef: float = Field(
        1.0, ge=0, description="Weight of the diversity penalty (similarity between samples) in the reward."
    )
    feature_device: str | None = Field(
        None,
        description="Device of the frozen copy in full fine-tuning (cuda:1, cpu); unset is the model's own.",
    )


class DropoutOption(Section):
    """What every trainer reads."""

    disable_dropout: bool = Field(True, description="Train without dropout, as the rollouts are sampled without it.")


class FeatureOptions(RewardOptions, DropoutOption):
    """What the trainers of both modes share: the reward, and what else is in the loss."""

    ce_coef: float = Field(0.0, ge=0, description="Weight of the cross-entropy on the reference text in the loss.")


class StridedOptions(FeatureOptions):
    """Everything the strided trainer needs to know beyond the usual training arguments."""

    stride: int = Field(8, ge=1, le=MAX_TOKENS, description="Tokens between two anchors of a document.")
    context_length: int = Field(
        8,
        ge=1,
        le=MAX_TOKENS,
        description="Fewest tokens before the first anchor of a document; a rollout sees the whole prefix.",
    )
    generate_max_len: int = Field(8, ge=1, le=MAX_TOKENS, description="Tokens sampled at each anchor.")
    n_samples_per_prompt: int = Field(4, ge=1, le=MAX_TOKENS, description="Rollouts sampled at each anchor.")
    temperature: float = Field(
        0.6,
        ge=0,
        description="Sampling temperature; rollouts are scored at it too. 0 is greedy, for evaluation only.",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Share of probability kept by nucleus sampling.")
    min_completion_prefix: int = Field(
        0, ge=0, le=MAX_TOKENS, description="Completion tokens before the first anchor of a prompt/completion row."
    )
    rl_coef: float = Field(1.0, ge=0, description="Weight of the policy-gradient term in the loss.")
    advantage_estimator: Literal["rloo", "group_norm", "reinforce"] = Field(
        "rloo", description="How the rewards of one anchor's rollouts become advantages."
    )
    rloo_baseline: Literal["independent", "mean"] = Field(
        "independent",
        description="Leave-one-out baseline: free of sample j also in the diversity terms, or the plain mean "
        "of the other rewards.",
    )
    rollout_tokens_per_pass: int | None = Field(
        None,
        ge=1,
        description="Rollout tokens in one forward at most, for when n_samples_per_prompt * blocks * generate_max_len "
        "do not fit into memory: more take several, with the same loss and gradient; unset takes all at once.",
    )
    single_pass: bool | None = Field(
        None,
        description="Train on what was computed while sampling, instead of computing it again; unset: on CPU. Not "
        "with gradient checkpointing, rollout_tokens_per_pass, dropout or FSDP.",
    )
    grad_norms_every: int = Field(
        0,
        ge=0,
        le=MAX_TOKENS,
        description="Log the gradient norms of the two terms of the loss, ebft/rl_grad_norm and ebft/ce_grad_norm, "
        "every so many optimizer steps; 0 is never. Such a step takes a backward pass more for each term, and memory "
        "for two float32 gradients. Not with FSDP, DeepSpeed, fp16 or reentrant gradient checkpointing.",
    )


class ThinkingOption(Section):
    """What both modes read where they turn a reference into tokens."""

    mask_thinking_ce: bool = Field(
        False,
        description="Leave thinking blocks (<think>...</think> and the like) of a reference out of the cross-entropy.",
    )


class StructuredOptions(Section):
    """What only structured mode reads."""

    adaptive_max_tokens: bool = Field(
        True,
        description="Limit each completion by the length of its own reference too, not by max_completion_length alone "
        "(structured mode).",
    )
    gt_length_multiplier: float = Field(
        1.5, ge=0.1, description="That limit, in lengths of the reference in tokens (structured mode)."
    )
    gt_length_floor: int = Field(
        64, ge=1, le=MAX_TOKENS, description="That limit is never below so many tokens (structured mode)."
    )


class ModeOption(Section):
    """Which of the two modes."""

    mode: Literal["structured", "strided"] = Field(
        "structured",
        description="structured: whole completions of prompts. strided: short rollouts along each document.",
    )


# pydantic lists the fields of the last base first.
class EBFTSection(StructuredOptions, StridedOptions, ThinkingOption, ModeOption):
    """The YAML section `ebft:`."""


def with_options(options_model: type[BaseModel]) -> Callable[[type], type]:
    """Give a class the options of `options_model` as dataclass fields; write it below `@dataclass`.

    Type, default and help come from the declaration; bounds are checked by `validate_options`.
    """

    def add_fields(cls: type) -> type:
        annotations = dict(cls.__dict__.get("__annotations__", {}))
        for name, info in options_model.model_fields.items():
            annotations[name] = info.annotation
            setattr(cls, name, _dataclass_field(info))
        cls.__annotations__ = annotations
        return cls

    return add_fields


def _dataclass_field(info: Any) -> Any:
    metadata = {"help": info.description}
    if info.default.__hash__ is None:  # a mutable default: every object gets its own copy
        return dataclasses.field(default_factory=lambda: info.get_default(), metadata=metadata)
    return dataclasses.field(default=info.default, metadata=metadata)


def options_from(options_model: type[BaseModel], given: dict[str, Any]) -> Any:
    """`options_model` made of `given`, defaults for the rest; ConfigError names an unknown or wrong option."""
    try:
        return options_model.model_validate(given)
    except ValidationError as error:
        raise_config_error(error, options_model)


def validate_options(options_model: type[BaseModel], obj: Any) -> None:
    """Check the attributes of `obj` against types and bounds; ConfigError names the first wrong option.

    Values that pydantic converts (an int for a float, a tuple for a list) are written back to `obj`.
    """
    given = {name: getattr(obj, name) for name in options_model.model_fields}
    try:
        checked = options_model.model_validate(given)
    except ValidationError as error:
        raise_config_error(error, options_model)
    for name in given:
        setattr(obj, name, getattr(checked, name))


def settle_single_sample(options: Any) -> None:
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
            f"{StridedOptions.model_fields['temperature'].default}); 0 is for evaluation."
        )
