"""What a run reports, and where: run.json, the report and the model card, the Hub, trackers. Do not import torch."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from ebft.catalog import looks_local, pinned_model
from ebft.config.section import changed_keys
from ebft.errors import SaveError, cause, doing, warn
from ebft.machine import installed_version, is_main_process
from ebft.methods.method import selecting_keys
from ebft.printed import say, without_secrets, without_secrets_in_text
from ebft.run.config.schema import RunConfig
from ebft.run_files import CARD, REPORT

if TYPE_CHECKING:
    from ebft.monitor.run_files import RunFiles, State

_REPORT = "ebft.tools.dashboard.report"  # by name: runs need no tools
PACKAGES = ("ebft", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


@contextmanager
def recorded(config: RunConfig) -> Iterator[RunFiles | None]:
    """Describe the run inside the block in `run.json`; yields the callback that does, on the main process."""
    if not is_main_process():
        yield None
        return
    from ebft.monitor.run_files import RunFiles  # imports torch

    files = RunFiles(config.output_dir, description(config) | {"data_digests": data_hashes(config)})
    files.start()
    try:
        yield files
    except KeyboardInterrupt:
        _end(config, files, "stopped")
        raise
    except BaseException as error:
        _end(config, files, "failed", without_secrets_in_text(f"{type(error).__name__}: {error}"))
        raise
    _end(config, files, "finished")


def _end(config: RunConfig, files: RunFiles, state: State, error: str | None = None) -> None:
    """Write the final state and the report; a report that fails is a warning."""
    if not files.end(state, error) and (Path(config.output_dir) / REPORT).is_file():
        return
    try:
        if find_spec("ebft.tools") is not None:
            import_module(_REPORT).write_report(Path(config.output_dir))
    except Exception as failure:  # the report must not change how the run ends
        warn(f"The report of the run was not written ({failure}).")


def method_of(config: RunConfig) -> str:
    """The values of the keys that select the method, such as "ebft strided"; its name if they are not text."""
    return " ".join(value for value in selecting_keys(config).values() if isinstance(value, str)) or config.method.name


def description(config: RunConfig) -> dict[str, Any]:
    """What run.json contains about a run in addition to its state, as JSON values."""
    return {
        "method": method_of(config),
        "model": without_secrets(config.base_model),
        "output_dir": config.output_dir,
        "config": without_secrets(config.model_dump(mode="json")),
        "changed": without_secrets(dict(changed_keys(config))),
        "versions": {"python": platform.python_version(), **versions()},
    }


def data_hashes(config: RunConfig) -> list[str | None]:
    """A hash of the files of each of `datasets`, by which `ebft evaluate` notices that they have changed."""
    from ebft.data.sources import content_digest  # imports datasets

    return [content_digest(entry) for entry in config.datasets]


def versions() -> dict[str, str]:
    """The versions of the installed packages that results depend on."""
    return {name: found for name in PACKAGES if (found := installed_version(name)) is not None}


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
    base, licence, named = config.base_model, None, f"`{_public(config.base_model)}`"
    if (fetched := pinned_model(base)) is not None:  # with its origin
        name, model = fetched
        base, licence, file = model.hub_id, model.license, Path(model.member).name
        named = f"`{name}` ({base}, {licence}, from {file} in {model.package} {model.version})"
    is_on_hub = lambda name: _HUB_ID.fullmatch(name) and not os.path.exists(name) and not looks_local(name)
    header = ModelCardData(
        base_model=base if is_on_hub(base) else None,  # the Hub refuses cards with others
        license=licence,
        library_name="peft" if config.adapter else "transformers",
        pipeline_tag=config.method.pipeline_tag,
        tags=[config.method.tag],
        datasets=[each.path for each in config.datasets if is_on_hub(each.path) and not each.data_files] or None,
    )
    weights = f"a {_ADAPTERS[config.adapter]} adapter for" if config.adapter else "all weights of"
    method = config.method.summary(config)
    title = (
        f"# {Path(config.output_dir).name}\n\nThis is {weights} {named}, trained by {method} with "
        f"`ebft` {version('ebft')}.\n\n## Data\n"
    )
    data = [f"- `{_public(entry.path)}`, split `{entry.split}`, as `{entry.type}`" for entry in config.datasets]
    shown = [(key, value) for key, value in changed_keys(config) if not key.startswith(_OF_MACHINES)]
    changed = {key: _public(value) for key, value in shown if key not in ("base_model", "datasets")}
    in_cell = lambda value: str(value).replace("|", "\\|").replace("\n", "\\n")  # which would end the cell
    options = [f"| `{key}` | `{in_cell(value)}` |" for key, value in without_secrets(changed).items()]
    results = [f"| `{name}` | {metrics[name]:.6g} |" for name in sorted(metrics) if name.startswith(_RESULTS)]
    about = "The options of the config that differ from their defaults, including options that have no effect"
    parts = [
        f"---\n{header.to_yaml()}\n---",
        without_secrets_in_text("\n".join([title, *data])),
        "\n".join([f"## Config\n\n{about} with this method.\n\n| option | value |\n| --- | --- |", *options]),
    ]
    if results:
        parts.append("\n".join(["## Results\n\nLast logged values.\n\n| metric | value |\n| --- | --- |", *results]))
    if config.method.citation:
        parts.append(f"## Citation\n\n```bibtex\n{config.method.citation}\n```")
    return _PATH.sub("", "\n\n".join(parts)) + "\n"


def _public(value: Any) -> Any:
    """`value` with the last parts of the absolute paths in it, since the names of folders are private."""
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) or value.startswith("~") else value
    if isinstance(value, list):
        return [_public(item) for item in value]
    return {key: _public(item) for key, item in value.items()} if isinstance(value, dict) else value


_WHEN = {
    "end": "model, tokenizer and model card at the end",
    "every_save": "model, tokenizer and model card at every save and at the end",
    "checkpoint": "the same and the newest checkpoint, with its optimizer state, at every save",
    "all_checkpoints": "the same and every checkpoint, with its optimizer state",
}


def check_hub(config: RunConfig) -> None:
    """Create the repository `hub_model_id`, on the main process; warn if it is public."""
    if not config.hub_model_id or not is_main_process():
        return
    from huggingface_hub import HfApi

    api = HfApi()
    with doing(f"creating hub_model_id: {config.hub_model_id!r} on the Hub (`hf auth login` logs in)"):
        name = api.create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True).repo_id
        is_private = api.repo_info(name).private
    say(f"Hub: {name} ({'private' if is_private else 'public'}), {_WHEN[config.hub_strategy]}", err=True)
    if config.hub_private_repo and not is_private:
        warn(
            f"hub_model_id: the repository {name} exists already and is public, so everyone can read what is pushed. "
            "Make it private in its settings, choose another id, or set hub_private_repo: false."
        )


def push(config: RunConfig, names: list[str], card: str, tokenizer: object = None) -> None:
    """Push the final model: its files among `names`, and its card. Raises SaveError, with the command that does."""
    from ebft.trainer.pushing import commit, pushed_files  # imports torch

    folder = Path(config.output_dir)
    files = {path.name: path for path in pushed_files(folder, names, tokenizer)}
    try:
        commit(config.hub_model_id, files, "End of training", card)
    except Exception as error:  # the client's transport errors have no common public base class
        words = ["hf", "upload", config.hub_model_id, str(folder), "."]
        included = [word for name in files for word in ("--include", name)]
        raise SaveError(
            f"The model is saved in {folder}, but it was not pushed to {config.hub_model_id} ({cause(error)}). To push "
            f"it, run the same command again with auto_resume_from_checkpoints=true, which does not train again, or: "
            f"{shlex.join([*words, *included])}"
        ) from error


# Keys whose environment variables have their names in capitals, apart from COMET_START_ONLINE.
_VARIABLES = (
    *("mlflow_tracking_uri", "mlflow_experiment_name", "hf_mlflow_log_artifacts"),
    *("swanlab_project", "swanlab_workspace", "swanlab_mode", "swanlab_log_model", "swanlab_api_host"),
    *("swanlab_web_host", "comet_workspace", "comet_project_name", "comet_experiment_key", "comet_mode"),
    "comet_online",
    *("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "wandb_watch", "wandb_log_model", "wandb_mode"),
)


# Keys that request a tracker, besides report_to, and the name of the tracker in transformers.
ASKED = {
    "use_tensorboard": "tensorboard",
    "use_trackio": "trackio",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_swanlab": "swanlab",
    "use_wandb": "wandb",
}


def trackers(config: RunConfig) -> list[str]:
    """Names for `report_to`; without the package wandb, `wandb_project` alone is a warning: shared configs set it."""
    names = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    names += [name for key, name in ASKED.items() if getattr(config, key) and name not in names]
    if config.use_wandb is None and config.wandb_project and "wandb" not in names:
        if find_spec("wandb") is not None:
            names.append("wandb")
        else:
            warn("wandb_project is set, but wandb is not installed (pip install wandb). The run continues without it.")
    return [name for name in names if name != "none"] or ["none"]


def start_trackers(names: list[str], run_name: str | None) -> None:
    """Start what needs a package, an account, or a network, so that its error precedes the model's loading."""
    from transformers.integrations import get_reporting_integration_callbacks

    with doing(f"creating the trackers of report_to: {names}"):
        for tracker in get_reporting_integration_callbacks(names):
            tracker()
    if "wandb" in names:
        wandb = import_module("wandb")
        with doing("starting the tracker wandb (wandb_mode: offline needs no account)"):
            if wandb.run is None:  # transformers continues with the run
                wandb.init(project=os.getenv("WANDB_PROJECT", "huggingface"), name=run_name)


def tracker_environment(config: RunConfig) -> dict[str, str]:
    """The environment variables that trackers and transformers read, for the keys that are set."""
    values = {key.upper(): getattr(config, key) for key in _VARIABLES}
    values["COMET_START_ONLINE"] = values.pop("COMET_ONLINE")
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if text is not None}
