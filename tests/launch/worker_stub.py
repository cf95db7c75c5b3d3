"""A process of a launch that ends as its argument says, without training: for test_agent.py."""

import os
import signal
import sys
import time
from pathlib import Path

from ebft.launch import worker

LONGEST = 60  # seconds


def wait_until(happened):
    end = time.monotonic() + LONGEST
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)


def main(act, folder):
    rank, received = os.environ.get("RANK", "0"), []
    if act == "signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: received.append(number))
    worker.join_launch()
    if act == "signals":
        for place, number in enumerate((signal.SIGINT, signal.SIGHUP)):
            if rank == "0":  # one after another: signals that arrive together are handled in the order of their numbers
                os.kill(os.getppid(), number)
            wait_until(lambda count=place: len(received) > count)
        Path(folder, rank).write_text(" ".join(map(str, received)))
        sys.exit(143)
    if act == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "killed":
        worker.leave_traceback("Connection closed by peer")  # the error that follows from the other's end
        sys.exit(1)
    if act == "traceback":
        worker.leave_traceback(f"the traceback of {rank}")
        sys.exit(1)
    if act == "silent" and rank == "1":
        sys.exit(3)
    if act == "reported":
        if worker.reports_failure():
            print("reported once", flush=True)
        sys.exit(2)


main(*sys.argv[1:])
