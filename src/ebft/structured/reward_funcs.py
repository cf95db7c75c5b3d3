"""Loading of reward functions by the names in a config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.config.imports import find_function
from ebft.config.options import RewardOptions
from ebft.config.section import option_names
from ebft.config.trl import TRLSection
from ebft.models.reward_model import load_reward_model
from ebft.structured.reward import FeatureMatchingReward

FEATURE_MATCHING = "feature_matching"


def load_reward_funcs(
    trl: TRLSection,
    ebft: RewardOptions,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    built_in: Mapping[str, Any] = MappingProxyType({}),
) -> list:
    """Return the rewards of `trl.reward_funcs`: functions by import path, `feature_matching`, or reward models.

    A name with a slash is the folder or the Hub id of a reward model. `built_in` are other rewards by their names.
    `feature_matching` uses the options of the section `ebft:`; with `rl: ebft`, the trainer adds it itself.
    """
    funcs: list[Any] = []
    for name in trl.reward_funcs or []:
        if name == FEATURE_MATCHING:
            funcs.append(
                FeatureMatchingReward(
                    model,
                    tokenizer,
                    trl.num_generations,
                    chat_template_kwargs=trl.chat_template_kwargs,
                    stop_token_ids=(trl.generation_kwargs or {}).get("stop_token_ids", ()),
                    **{option: getattr(ebft, option) for option in option_names(RewardOptions)},
                )
            )
        elif name in built_in:
            funcs.append(built_in[name])
        elif "/" in name:
            funcs.append(load_reward_model(name))
        else:
            funcs.append(find_function("trl.reward_funcs", name))
    return funcs
