"""Loading of reward functions by the names in a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebft.catalog import lasting_name
from ebft.config.options import RewardOptions
from ebft.config.trl import TRLSection
from ebft.config.user_functions import find_function
from ebft.errors import ConfigError, ModelError
from ebft.files import ADAPTER_CONFIG
from ebft.models.adapter import load_saved_adapter, read_adapter_config
from ebft.models.causal_lm import SCORE
from ebft.models.files import reward_problem
from ebft.models.pretrained import explained, find_model, pretrained_config, pretrained_model, pretrained_tokenizer
from ebft.structured.reward import reward_of

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
            funcs.append(reward_of(model, tokenizer, trl, ebft))
        elif name in built_in:
            funcs.append(built_in[name])
        elif "/" in name:
            funcs.append(load_reward_model(name))
        else:
            funcs.append(find_function("trl.reward_funcs", name))
    return funcs


def load_reward_model(name: str) -> PreTrainedModel:
    """The reward model in a folder, also of an adapter, or with a Hub id, an entry of `trl.reward_funcs`.

    Its weights have the data type that they are saved in; an adapter is merged. Raises ConfigError for a model without
    exactly one score per text, and ModelError if it, or its tokenizer, cannot be loaded.
    """
    problem = reward_problem(name)
    if problem is not None:
        raise ConfigError(problem)
    with _loading(name) as folder:
        if (folder / ADAPTER_CONFIG).is_file():
            model = _of_adapter(folder)
        else:
            found = find_model(name, "trl.reward_funcs")
            config = pretrained_config(found)
            problem = reward_problem(name, config.to_dict() | {"id2label": config.id2label})
            if problem is not None:
                raise ConfigError(problem)
            model = pretrained_model(found, SCORE, dtype="auto")
        pretrained_tokenizer(model.config.name_or_path)  # TRL loads it from there
    return model.eval().requires_grad_(False)


def reward_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a reward model, an entry of `trl.reward_funcs`. Raises ModelError if it cannot be loaded."""
    with _loading(name, passes=()) as folder:
        return pretrained_tokenizer(str(folder) if folder.is_dir() else find_model(name, "trl.reward_funcs"))


@contextmanager
def _loading(name: str, passes: tuple[type[Exception], ...] = (ConfigError,)) -> Iterator[Path]:
    """Context manager whose errors are ModelErrors, except those that pass."""
    folder = Path(lasting_name(name))
    try:
        yield folder
    except passes:
        raise
    except Exception as error:  # transformers and PEFT raise many types of errors for unsuitable files
        raise ModelError(f"trl.reward_funcs: {name!r} cannot be loaded: {explained(error)}") from error


def _of_adapter(folder: Path) -> PreTrainedModel:
    base = read_adapter_config(folder).base_model_name_or_path
    if not base:
        raise ModelError(f"{folder / ADAPTER_CONFIG} does not name the base model")
    found = find_model(base, f"base model of {folder}")
    config = pretrained_config(found)
    config.num_labels = SCORE.num_labels
    model = pretrained_model(found, SCORE, may_lack_head=True, config=config, dtype="auto")
    tokens = len(pretrained_tokenizer(str(folder)))
    merged = load_saved_adapter(model, str(folder), tokens).merge_and_unload()
    merged.config.name_or_path = str(folder)
    return merged
