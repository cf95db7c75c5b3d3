"""Page faults of tensors that are freed and allocated again."""

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
from ebft.prefix.cpu import keep_freed_memory
keep_freed_memory()
fill = lambda: [torch.ones(2**24) for _ in range(4)]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fill()
print(min(faults() for _ in range(4)) * resource.getpagesize() / (4 * 2**26))
"""


@pytest.mark.slow  # a process that imports torch
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the setting is for training on CPU")
def test_freed_memory_is_used_again():
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 0.05
