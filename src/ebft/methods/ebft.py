"""Shared by both modes of energy-based fine-tuning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebft.config import rules
from ebft.config.options import FeatureOptions
from ebft.config.section import option_names
from ebft.methods.method import HEALTHY_ROLLOUTS

if TYPE_CHECKING:
    from ebft.machine import Machine
    from ebft.methods.method import MethodConfig

CITATION = """\
@article{jelassi2026matching,
  title   = {Matching Features, Not Tokens: Energy-Based Fine-Tuning of Language Models},
  author  = {Jelassi, Samy and Kwun, Mujin and Zhao, Rosie and Li, Yuanzhi and Fusi, Nicolo and Du, Yilun and
             Kakade, Sham M. and Domingo-Enrich, Carles},
  journal = {arXiv preprint arXiv:2603.12248},
  year    = {2026}
}"""
HEALTHY = {"grad_norm": (None, 3.0), "whitened alignment": (0.3, 1.9), **HEALTHY_ROLLOUTS}
PAPER = "Jelassi et al. 2026, [arXiv 2603.12248](https://arxiv.org/abs/2603.12248)"


def feature_conflicts(config: MethodConfig) -> Iterator[str]:
    """A device for the feature network, which has no effect with an adapter."""
    found = rules.feature_device(config.ebft.feature_device, config.adapter is not None, rules.in_config)
    if found:
        yield found


def missing_device(config: MethodConfig, machine: Machine) -> Iterator[str]:
    """The configured device of the feature network, if this machine does not have it."""
    device = config.ebft.feature_device
    if device is not None and device not in machine.devices:
        yield f"ebft.feature_device: {device!r} is unavailable. Choose from {', '.join(machine.devices)}, or remove it."


def warn_of_options(options: type, of_mode: str, config: MethodConfig, *sections: str) -> None:
    """One warning for the `options` of `ebft:` and the sections that only the other mode reads."""
    foreign = (set(option_names(options)) - set(option_names(FeatureOptions))) & config.ebft.model_fields_set
    idle = [f"ebft.{key}" for key in sorted(foreign)] + [key for key in sections if key in config.model_fields_set]
    if idle:
        warnings.warn(
            f"{', '.join(idle)}: no effect on training in {config.ebft.mode} mode, only in {of_mode} mode.",
            stacklevel=2,
        )


def warn_of_reward(config: MethodConfig) -> None:
    """One warning for each setting of the feature-matching reward without effect."""
    ebft = config.ebft
    if ebft.alignment_coef == 0 and ebft.diversity_coef == 0:
        warnings.warn(
            "ebft.alignment_coef: 0 and ebft.diversity_coef: 0: the feature-matching reward is always 0, so it has no "
            "effect. Set one of them above 0.",
            stacklevel=2,
        )
    if "whitening_space" in ebft.model_fields_set and not ebft.use_whitening:
        warnings.warn("ebft.whitening_space: no effect without ebft.use_whitening: true.", stacklevel=2)


def reference_limit(config: MethodConfig) -> tuple[float, int] | None:
    """Length limit of a completion: multiple of the reference length, minimum number of tokens. None if disabled."""
    ebft = config.ebft
    return (ebft.gt_length_multiplier, ebft.gt_length_floor) if ebft.adaptive_max_tokens else None
