"""Tests of `ebft.tools.quickstart.run`: page faults of tensors that are freed and allocated again."""

import os
import platform
import subprocess
import sys

import pytest
import torch

# Four tensors of 64 MiB at once, again and again; the fewest page faults of one time, relative to its number of pages.
# Small objects between freed tensors can leave gaps that are a few bytes too small for the first time after.
SCRIPT = """
import resource, torch
{setting}
fill = lambda: [torch.ones(2**24) for _ in range(4)]
faulted = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def faults():
    before = faulted()
    fill()
    return faulted() - before
fill()
print(min(faults() for _ in range(4)) * resource.getpagesize() / (4 * 2**26))
"""
KEEP = "from ebft.prefix.cpu import keep_freed_memory; keep_freed_memory()"


@pytest.mark.slow  # three processes that import torch
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the setting is for training on CPU")
def test_freed_memory_is_used_again_unless_the_environment_has_settings():
    def share_of_pages(setting, **variables):
        """The share of pages that are requested from the operating system again."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
        command = [sys.executable, "-c", SCRIPT.format(setting=setting)]
        return float(subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=True).stdout)

    assert share_of_pages(KEEP) < 0.05 < 0.5 < share_of_pages("")
    assert share_of_pages(KEEP, MALLOC_TRIM_THRESHOLD_="131072") > 0.5
