"""Replayed and repeated prompts, the check of samples, and the adapter's synchronisation, on two processes."""

import pytest

from tests.ranks import run_module


@pytest.mark.slow
def test_processes_agree(tmp_path):
    run_module("tests.structured.two_processes", 2, str(tmp_path))
