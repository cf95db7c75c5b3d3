"""An environment without launcher and cluster."""

import pytest


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
