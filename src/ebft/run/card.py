"""The model card of a run: model, method, data, config and results, without paths and servers of this machine."""

import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.dashboard.files import CARD
from ebft.data.locate import looks_local
from ebft.fetch.catalog import pinned_model
from ebft.secrets import without_secrets, without_secrets_in_text

# Prefixes of the metrics in the card: speed, memory and schedule are not results of the model.
_RESULTS = ("ebft/", "entropy", "eval_", "loss", "reward", "train_loss")
_ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}
# Options that name servers and accounts.
_OF_MACHINES = ("vllm.", "trl.vllm_server_", "hub_", "wandb_", "mlflow_", "comet_", "trackio_", "nemo_gym_")
_PATH = re.compile(r"(?<![\w/:.~<])~?(?:/[\w.@+%-]+)+/(?=[\w.@+%-])")  # an absolute path up to its last part
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def write_model_card(config: RunConfig, metrics: Mapping[str, float], folder: Path) -> None:
    """Write README.md into `folder`."""
    (folder / CARD).write_text(model_card(config, metrics), encoding="utf-8")


def model_card(config: RunConfig, metrics: Mapping[str, float]) -> str:
    """The card as Markdown with the hub's YAML header."""
    parts = [_header(config), _summary(config), _config(config), _results(metrics)]
    if config.method.citation:
        parts.append(f"## Citation\n\n```bibtex\n{config.method.citation}\n```")
    return _PATH.sub("", "\n\n".join(part for part in parts if part)) + "\n"


def _public(value: Any) -> Any:
    """`value` with the last parts of the absolute paths in it, since the names of folders are private."""
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) or value.startswith("~") else value
    if isinstance(value, list):
        return [_public(item) for item in value]
    return {key: _public(item) for key, item in value.items()} if isinstance(value, dict) else value


def _on_hub(name: str) -> bool:
    """Whether `name` can be an id of the Hub, which refuses cards with others in their header."""
    return _HUB_ID.fullmatch(name) is not None and not os.path.exists(name) and not looks_local(name)


def _header(config: RunConfig) -> str:
    fetched = pinned_model(config.base_model)
    base = config.base_model if fetched is None else fetched[1].hub_id
    header = ModelCardData(
        base_model=base if _on_hub(base) else None,
        license=None if fetched is None else fetched[1].license,
        library_name="peft" if config.adapter else "transformers",
        pipeline_tag=config.method.pipeline_tag,
        tags=[config.method.tag],
        datasets=[each.path for each in config.datasets if _on_hub(each.path) and not each.data_files] or None,
    )
    return f"---\n{header.to_yaml()}\n---"


def _summary(config: RunConfig) -> str:
    method = config.method.summary(config)
    weights = f"a {_ADAPTERS[config.adapter]} adapter for" if config.adapter else "all weights of"
    data = "\n".join(
        f"- `{_public(entry.path)}`, split `{entry.split}`, as `{entry.type}`" for entry in config.datasets
    )
    return without_secrets_in_text(
        f"# {Path(config.output_dir).name}\n\nThis is {weights} {_base(config)}, trained by {method} with "
        f"`ebft` {version('ebft')}.\n\n## Data\n\n{data}"
    )


def _base(config: RunConfig) -> str:
    """The base model in a sentence: its name, and the origin of a fetched model."""
    fetched = pinned_model(config.base_model)
    if fetched is None:
        return f"`{_public(config.base_model)}`"
    name, model = fetched
    return (
        f"`{name}` ({model.hub_id}, {model.license}, from {Path(model.member).name} in {model.package} {model.version})"
    )


def _config(config: RunConfig) -> str:
    skipped = ("base_model", "datasets")
    changed = {
        key: _public(value)
        for key, value in changed_keys(config)
        if key not in skipped and not key.startswith(_OF_MACHINES)
    }
    rows = "\n".join(f"| `{key}` | `{_cell(value)}` |" for key, value in without_secrets(changed).items())
    return (
        "## Config\n\nThe options of the config that differ from their defaults, including options that have no effect "
        f"with this method.\n\n| option | value |\n| --- | --- |\n{rows}"
    )


def _cell(value: object) -> str:
    """The text of a value in a cell of a Markdown table, in which `|` and line breaks would end the cell."""
    return str(value).replace("|", "\\|").replace("\n", "\\n")


def _results(metrics: Mapping[str, float]) -> str:
    told = {name: value for name, value in sorted(metrics.items()) if name.startswith(_RESULTS)}
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in told.items())
    return f"## Results\n\nLast logged values.\n\n| metric | value |\n| --- | --- |\n{rows}" if rows else ""
