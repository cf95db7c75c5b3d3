"""The files that describe a run in its output folder, from its start to its end."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.dashboard.files import REPORT
from ebft.dashboard.report import write_report
from ebft.methods import selecting_keys
from ebft.monitor.run_files import RunFiles, State
from ebft.secrets import without_secrets, without_secrets_in_text

PACKAGES = ("ebft", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


@contextmanager
def recorded(config: RunConfig) -> Iterator[RunFiles | None]:
    """Describe the run inside the block in `run.json`: running, then finished, stopped (Ctrl-C) or failed.

    Yields the callback that also writes the metrics, or None in processes other than the main one.
    """
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    files = RunFiles(config.output_dir, description(config) | {"data_digests": data_digests(config)})
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
        write_report(Path(config.output_dir))
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


def data_digests(config: RunConfig) -> list[str | None]:
    """A hash of the files of each of `datasets`, by which `ebft evaluate` notices that they have changed."""
    from ebft.data.fingerprint import content_digest  # imports datasets

    return [content_digest(entry) for entry in config.datasets]


def versions() -> dict[str, str]:
    """The versions of the installed packages that results depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
