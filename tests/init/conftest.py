"""A machine for which configs are proposed, the same wherever the tests run."""

import pytest


@pytest.fixture(autouse=True)
def slow_bfloat16(monkeypatch):
    """Configs are those for a processor without instructions for bfloat16."""
    monkeypatch.setattr("ebft.tools.init.config.bfloat16_is_fast", lambda: False)
