"""Fixtures of strided mode."""

import pytest


@pytest.fixture
def without_parity_check(monkeypatch):
    """Trainers do not compare their model with the plain one, which takes a seventh of a test of a step."""
    monkeypatch.setattr("ebft.strided.trainer.check_parity", lambda *args, **kwargs: None)
