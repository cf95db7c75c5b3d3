"""Waiting for what another process does."""

import time

LONGEST = 60  # seconds


def wait_until(happened):
    """Wait until `happened()` is true, or for `LONGEST`."""
    end = time.monotonic() + LONGEST
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
