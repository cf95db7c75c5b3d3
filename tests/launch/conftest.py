"""What the tests of launching share: the command line, and an environment without launcher and cluster."""

import pytest

from tests.cli.conftest import ebft

__all__ = ["ebft"]


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
