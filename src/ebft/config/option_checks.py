"""Checks of the values of EBFT options, for configs and for the trainers' arguments."""

import warnings
from typing import Any

from pydantic import ValidationError

from ebft.config.options import MIN_TEMPERATURE, RewardOptions, StridedOptions
from ebft.config.section import option_names, section_of_options
from ebft.config.validation_errors import raise_config_error
from ebft.errors import ConfigError


def options_from(options: type, given: dict[str, Any]) -> Any:
    """Build `options` from `given`, with defaults for the rest. Raises ConfigError for unknown or invalid options."""
    section = section_of_options(options)
    try:
        return section.model_validate(given)
    except ValidationError as error:
        raise_config_error(error, section)


def validate_options(options: type, obj: Any) -> None:
    """Check the attributes of `obj` against types and bounds. Raises ConfigError that names the invalid options.

    Values that pydantic converts (an int for a float, a tuple for a list) are written back to `obj`.
    """
    checked = options_from(options, {name: getattr(obj, name) for name in option_names(options)})
    for name in option_names(options):
        setattr(obj, name, getattr(checked, name))


def resolve_single_sample(options: Any) -> None:
    """With one sample per anchor, use `reinforce` without diversity and whitening, and warn.

    There is no baseline, there are no pairs, and whitening by a single sample gives every sample the same reward.
    """
    if options.n_samples_per_prompt > 1:
        return
    changes = []
    if options.advantage_estimator != "reinforce":
        options.advantage_estimator = "reinforce"
        changes.append("advantage_estimator is set to reinforce")
    if options.diversity_coef != 0:
        options.diversity_coef = 0.0
        changes.append("diversity_coef is set to 0")
    if options.use_whitening:
        options.use_whitening = False
        changes.append("use_whitening is set to false")
    if changes:
        reason = "n_samples_per_prompt: 1 provides no other sample for a baseline, the diversity term or whitening"
        warnings.warn(f"{reason}: {', '.join(changes)}.", stacklevel=2)


def resolve_single_completion(options: RewardOptions, num_generations: int) -> None:
    """Switch whitening off for the reward of single completions, and warn; see `resolve_single_sample`."""
    if num_generations > 1 or not options.use_whitening:
        return
    options.use_whitening = False
    warnings.warn(
        "num_generations: 1 provides no other completion for whitening, which would give every completion the same "
        "reward: use_whitening is set to false.",
        stacklevel=3,
    )


def check_trainable(options: Any) -> None:
    """Raise ConfigError for options that are valid for evaluation but give no training signal."""
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"temperature: {options.temperature} is too small: dividing logits by it overflows. Set it to at least "
            f"{MIN_TEMPERATURE}."
        )
    if options.temperature == 0:
        raise ConfigError(
            "temperature: 0 is greedy decoding: all rollouts are identical, so their advantages are zero. "
            "Set temperature above 0 (default: "
            f"{StridedOptions.temperature}); 0 is only supported for computing a loss without training."
        )
    has_reward = options.alignment_coef > 0 or options.diversity_coef > 0
    if options.ce_coef == 0 and not (options.rl_coef > 0 and has_reward):
        zero = "rl_coef: 0" if options.rl_coef == 0 else "alignment_coef: 0 with diversity_coef: 0"
        raise ConfigError(
            f"{zero} and ce_coef: 0: the loss is always 0, so nothing is trained. Set one of them above 0."
        )
