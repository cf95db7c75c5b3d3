"""An interpreter without vLLM is an error before anything starts."""

import sys

import pytest

from ebft.errors import ConfigError
from ebft.serving.command import find_interpreter


@pytest.fixture
def with_vllm(tmp_path, monkeypatch):
    """Puts an empty package of that name where interpreters find it."""
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text("raise SystemExit('must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))


def test_ours_is_the_default(with_vllm):
    assert find_interpreter(None) == sys.executable


def test_a_link_stays_a_link(with_vllm, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("python", ["/nowhere/bin/python", "no-such-python"])
def test_no_program(python):
    with pytest.raises(ConfigError, match=f"vllm.python: {python} is not an executable"):
        find_interpreter(python)
