"""The command line in this process, for tests of new configs."""

import pytest

from tests.cli.conftest import ebft, refused

__all__ = ["ebft", "refused"]


@pytest.fixture(autouse=True)
def slow_bfloat16(monkeypatch):
    """Configs are those for a processor without instructions for bfloat16."""
    monkeypatch.setattr("ebft.tools.init.config.bfloat16_is_fast", lambda: False)
