"""What a run reports: run.json and the final report, trackers, the Hub, and plugins that follow it."""

from __future__ import annotations

import importlib
import platform
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ebft.config.schema import RunConfig
from ebft.config.section import changed_keys
from ebft.errors import ConfigError, SaveError, cause
from ebft.machine import installed_version
from ebft.methods.method import selecting_keys
from ebft.monitor.run_files import RunFiles, State
from ebft.processes import is_main_process
from ebft.run_files import REPORT
from ebft.secrets import without_secrets, without_secrets_in_text
from ebft.trainer.pushing import commit, pushed_files

_REPORT = "ebft.tools.dashboard.report"  # by name: runs need no tools
PACKAGES = ("ebft", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


@contextmanager
def recorded(config: RunConfig) -> Iterator[RunFiles | None]:
    """Describe the run inside the block in `run.json`: running, then finished, stopped (Ctrl-C) or failed.

    Yields the callback that also writes the metrics, or None in processes other than the main one.
    """
    if not is_main_process():
        yield None
        return
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
            importlib.import_module(_REPORT).write_report(Path(config.output_dir))
    except Exception as failure:  # the report must not change how the run ends
        warnings.warn(f"The report of the run was not written ({failure}).", stacklevel=2)


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


_WHEN = {
    "end": "model, tokenizer and model card at the end",
    "every_save": "model, tokenizer and model card at every save and at the end",
    "checkpoint": "the same and the newest checkpoint, with its optimizer state, at every save",
    "all_checkpoints": "the same and every checkpoint, with its optimizer state",
}


def check_hub(config: RunConfig) -> None:
    """Create the repository `hub_model_id` on the main process, and print what will be pushed to it.

    Raises ConfigError if that fails. An existing repository that is public gives a warning, unless
    hub_private_repo is false.
    """
    if not config.hub_model_id or not is_main_process():
        return
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        name = api.create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True).repo_id
        is_private = api.repo_info(name).private
    except Exception as error:  # the client's transport errors have no common public base class
        raise ConfigError(
            f"hub_model_id: {config.hub_model_id!r} cannot be created or reached on the Hub ({cause(error)}). Log in "
            "with `hf auth login`, correct the id, or remove hub_model_id to keep the model on this machine."
        ) from error
    print(f"Hub: {name} ({'private' if is_private else 'public'}), {_WHEN[config.hub_strategy]}", file=sys.stderr)
    if config.hub_private_repo and not is_private:
        warnings.warn(
            f"hub_model_id: the repository {name} exists already and is public, so everyone can read what is pushed. "
            "Make it private in its settings, choose another id, or set hub_private_repo: false.",
            stacklevel=2,
        )


def push(config: RunConfig, names: list[str], card: str, tokenizer: object = None) -> None:
    """Push the final model: those of the files `names` in the output folder that belong to a model, and its card.

    Raises SaveError, with the command that pushes by hand, if that fails.
    """
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
