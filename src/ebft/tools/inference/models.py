"""A trained model, its tokenizer and its base model, from a config or from a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftModel
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebft.catalog import base_name, lasting_name
from ebft.config.keys.data import DatasetEntry
from ebft.config.keys.models import ModelSettings
from ebft.config.options import EBFTSection, RewardOptions
from ebft.config.section import option_names
from ebft.data.messages import Message
from ebft.data.transforms.formats import written_prompt
from ebft.errors import ModelError, doing, prefixed
from ebft.models.adapter import load_saved_adapter, read_adapter_config
from ebft.models.load import as_trained, load_base_model
from ebft.models.pretrained import load_tokenizer
from ebft.models.weight_files import pickles, refuse_parts
from ebft.run.checkpoints import checkpoint_hint
from ebft.run.config.schema import RunConfig
from ebft.run_files import keys_of_base, read_object, run_of_model
from ebft.tools.evaluation.models import ADAPTER_FILE, keeps_base, placed


@dataclass
class Loaded:
    """A trained model in eval mode, with its tokenizer; the base model is loaded when it is first needed.

    `reward`: options of `FeatureMatchingReward`, and where they are from; `template`: extra arguments of the chat
    template; `write`: how questions are written, as the datasets do.
    """

    name: str
    tuned: nn.Module
    tokenizer: PreTrainedTokenizerBase
    load_base: Callable[[], PreTrainedModel]
    reward: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] | None = None
    reward_origin: str = "defaults"
    write: Callable[[str], str | list[Message]] = written_prompt(())

    @property
    def reward_settings(self) -> str:
        """The options of the reward and their origin, in one line."""
        values = asdict(RewardOptions(**self.reward))
        del values["feature_device"]
        if not values["use_whitening"]:
            del values["whitening_space"]
        return f"{', '.join(f'{name}: {value}' for name, value in values.items())} ({self.reward_origin})"

    @cached_property
    def shares_base(self) -> bool:
        """Whether the model with its adapter disabled is exactly the base model."""
        return isinstance(self.tuned, PeftModel) and keeps_base(self.tuned.active_peft_config)

    @cached_property
    def base(self) -> PreTrainedModel:
        """The base model on its own, in eval mode."""
        return placed(self.load_base()).eval().requires_grad_(False)

    @contextmanager
    def model(self, base: bool) -> Iterator[nn.Module]:
        """The trained model, or with `base` the base model, which is the same one without adapter where possible."""
        if base and self.shares_base:
            with self.tuned.disable_adapter():
                yield self.tuned
        else:
            yield self.base if base else self.tuned


def model_of_run(config: RunConfig, folder: Path | None = None) -> Loaded:
    """The trained model in the `output_dir` of a config, or in `folder`. Raises ModelError if there is none."""
    folder = folder or Path(config.output_dir)
    _check_model(folder)
    config, tokenizer = as_trained(config, folder), load_tokenizer(config)
    return Loaded(
        str(folder),
        _open(config, folder, tokenizer),
        tokenizer,
        lambda: load_base_model(config, tokenizer),
        {name: getattr(config.ebft, name) for name in option_names(RewardOptions)},
        config.chat_template_kwargs,
        "from the config",
        written_prompt(config.datasets or []),
    )


def model_in_folder(name: str, base: str | None = None) -> Loaded:
    """The model or adapter in a folder, or of `ebft fetch`.

    `base` replaces the base model that the adapter, or the card of a full model, names. The options of the reward are
    taken from the run that trained the model, if its run.json is there. Raises ModelError for a folder without a model.
    """
    folder = Path(lasting_name(name))
    _check_model(folder)
    refuse_parts(folder)
    is_adapter = (folder / ADAPTER_FILE).is_file()
    of_base = keys_of_base(folder) if is_adapter and base is None else {}
    base = base or (read_adapter_config(folder).base_model_name_or_path if is_adapter else _base_of_model(folder))
    has_tokenizer = any(folder.glob("tokenizer*"))
    settings = ModelSettings(
        base_model=base if is_adapter else str(folder),
        tokenizer_config=str(folder) if has_tokenizer else None,
        **of_base,
    )
    tokenizer = load_tokenizer(settings)

    def load_base() -> PreTrainedModel:
        if base is None:
            raise ModelError(f"{name} does not name the model that it was trained from. Give it with --base-model.")
        return load_base_model(ModelSettings(base_model=base, **of_base), tokenizer)

    return Loaded(str(folder), _open(settings, folder, tokenizer), tokenizer, load_base, *_of_run(folder))


def _of_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None, str, Callable[[str], str | list[Message]]]:
    """For a model in a folder: options of the reward, arguments of the chat template, their origin, `write`."""
    found = run_of_model(folder)
    if found is None:
        origin = f"defaults: {folder} has no run.json of its run. Give the config of the run to use its settings"
        return {}, None, origin, written_prompt(())
    path, config = found
    given, trl, names = config.get("ebft") or {}, config.get("trl") or {}, option_names(RewardOptions)
    with doing(f"reading the settings in {path}"):
        section = EBFTSection.model_validate({name: given[name] for name in names if name in given})
        template = config.get("chat_template_kwargs") or trl.get("chat_template_kwargs")
    reward, write = {name: getattr(section, name) for name in names}, written_prompt(())
    with suppress(ValidationError):  # of another release
        write = written_prompt([DatasetEntry.model_validate(entry) for entry in config.get("datasets") or ()])
    return reward, template, f"from {path}", write


def _check_model(folder: Path) -> None:
    """Raise ModelError for a folder without a model; the message names its newest checkpoint, if there is one."""
    has_weights = any(folder.glob("*.safetensors")) or bool(pickles(folder))
    if not (folder / ADAPTER_FILE).is_file() and not ((folder / "config.json").is_file() and has_weights):
        raise ModelError(f"{folder} contains no trained model. {checkpoint_hint(folder, 'ebft inference {}')}".strip())


def _open(settings: ModelSettings, folder: Path, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The model in `folder`; an adapter is attached to the base model of the settings."""
    if (folder / ADAPTER_FILE).is_file():
        with prefixed(f"The adapter in {folder} cannot be loaded on {settings.base_model}"):
            refuse_parts(folder)
            model = load_saved_adapter(load_base_model(settings, tokenizer), str(folder), len(tokenizer))
    else:
        own = {"base_model": str(folder), "gguf_file": None, "base_model_config": None, "revision_of_model": None}
        model = load_base_model(settings.model_copy(update=own), tokenizer)
    return placed(model).eval().requires_grad_(False)


def _base_of_model(folder: Path) -> str | None:
    """The base model that a full model's checkpoint or card names."""
    if (saved := read_object(folder / "ebft_run.json")) is not None:
        base, file = saved.get("base_model"), saved.get("gguf_file")
        return base if base is None or file is None else base_name(base, file)
    if not (folder / "README.md").is_file():
        return None
    try:
        found = ModelCard.load(folder / "README.md").data.base_model
    except Exception:  # no YAML header, or one that its reader, of another library, refuses
        return None
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, str) else None
