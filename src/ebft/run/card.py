"""The model card of a run: model, method, data, config and results."""

import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCardData

from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.data.locate import base_name
from ebft.fetch.catalog import pinned_model
from ebft.secrets import without_secrets, without_secrets_in_text

# Prefixes of the metrics in the card: speed, memory and schedule are not results of the model.
_RESULTS = ("ebft/", "entropy", "eval_", "loss", "reward", "train_loss")
_ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}


CARD = "README.md"


def write_model_card(config: RunConfig, metrics: Mapping[str, float], folder: Path) -> None:
    """Write README.md into `folder`."""
    (folder / CARD).write_text(model_card(config, metrics), encoding="utf-8")


def model_card(config: RunConfig, metrics: Mapping[str, float]) -> str:
    """The card as Markdown with the hub's YAML header."""
    parts = [_header(config), _summary(config), _config(config), _results(metrics)]
    if config.method.citation:
        parts.append(f"## Citation\n\n```bibtex\n{config.method.citation}\n```")
    return _without_home("\n\n".join(part for part in parts if part)) + "\n"


def _without_home(text: str) -> str:
    """`text` with `~` in place of the home folder, whose name is private."""
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?=[/`'\"\s]|$)", "~", text, flags=re.MULTILINE)


def _header(config: RunConfig) -> str:
    fetched = pinned_model(config.base_model)
    local = base_name(config.base_model, config.gguf_file)
    header = ModelCardData(
        base_model=without_secrets_in_text(local) if fetched is None else fetched[1].hub_id,
        license=None if fetched is None else fetched[1].license,
        library_name="peft" if config.adapter else "transformers",
        pipeline_tag=config.method.pipeline_tag,
        tags=[config.method.tag],
        datasets=without_secrets([entry.path for entry in config.datasets if not os.path.exists(entry.path)]) or None,
    )
    return f"---\n{header.to_yaml()}\n---"


def _summary(config: RunConfig) -> str:
    method = config.method.summary(config)
    weights = f"a {_ADAPTERS[config.adapter]} adapter for" if config.adapter else "all weights of"
    data = "\n".join(f"- `{entry.path}`, split `{entry.split}`, as `{entry.type}`" for entry in config.datasets)
    return without_secrets_in_text(
        f"# {Path(config.output_dir).name}\n\nThis is {weights} {_base(config)}, trained by {method} with "
        f"`ebft` {version('ebft')}.\n\n## Data\n\n{data}"
    )


def _base(config: RunConfig) -> str:
    """The base model in a sentence: its name, and the origin of a fetched model."""
    fetched = pinned_model(config.base_model)
    if fetched is None:
        return f"`{config.base_model}`"
    name, model = fetched
    return (
        f"`{name}` ({model.hub_id}, {model.license}, from {Path(model.member).name} in {model.package} {model.version})"
    )


def _config(config: RunConfig) -> str:
    changed = {key: value for key, value in changed_keys(config) if key not in ("base_model", "datasets")}
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
