"""An interpreter without vLLM is an error before anything starts."""

import sys

import pytest

from ebft.errors import ConfigError
from ebft.serving.command import find_interpreter


def test_ours_is_the_default_and_a_link_stays_a_link(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert find_interpreter(None) == sys.executable
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert find_interpreter("./python") == str(tmp_path / "python")


def test_no_package(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()  # a folder of the user's own is not the package
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigError, match="vLLM is not installed in .*pip install 'ebft.vllm.'.*set vllm.python"):
        find_interpreter(None)
    with pytest.raises(ConfigError, match=f"vllm.python: the package vllm is not installed in {sys.executable}"):
        find_interpreter(sys.executable)
    for python in ("/nowhere/bin/python", "no-such-python"):
        with pytest.raises(ConfigError, match=f"vllm.python: {python} is not an executable"):
            find_interpreter(python)
