"""Replayed and repeated prompts, the check of samples, and the adapter's synchronisation, on two processes."""

from tests.strided.test_distributed import launch


def test_processes_agree(tmp_path):
    launch("tests.structured.two_processes", 2, str(tmp_path))
