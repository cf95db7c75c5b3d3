"""A process of a launch that ends as its argument says, without training: for test_agent.py."""

import os
import signal
import sys
import time
from pathlib import Path

from ebft.machine import LAUNCH_PARENT, join_launch, leave_error, reports_failure, watch_parent

LONGEST = 60  # seconds


def wait_until(happened):
    """Wait until `happened()` is true, or for `LONGEST`."""
    end = time.monotonic() + LONGEST
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)


def _meet(folder, rank):
    """Wait until both processes are here."""
    folder.mkdir(exist_ok=True)
    (folder / rank).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2)


def main(act, folder):
    rank, received = os.environ.get("RANK", "0"), []
    if act in ("signals", "orphan"):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: received.append(number))
    if act == "orphan":
        watch_parent()
        assert LAUNCH_PARENT not in os.environ
        Path(folder, "started").touch()
        wait_until(lambda: received)
        written = Path(folder, "writing")
        written.write_text(" ".join(str(int(number)) for number in received))
        written.rename(Path(folder, "stopped"))
        sys.exit()
    if act == "parent":
        Path(folder, rank).write_text(os.environ[LAUNCH_PARENT])
    join_launch()
    if act == "listening":
        import psutil
        from torch import distributed  # imported for this one only, as it is slow

        distributed.init_process_group("gloo")
        _meet(Path(folder, "here"), rank)
        connections = psutil.Process(os.getppid()).net_connections()
        Path(folder, rank).write_text(" ".join({each.laddr.ip for each in connections if each.status == "LISTEN"}))
        distributed.barrier()
        distributed.destroy_process_group()
        sys.exit()
    if act == "signals":
        for place, number in enumerate((signal.SIGINT, signal.SIGHUP)):
            if rank == "0":  # one after another: signals that arrive together are handled in the order of their numbers
                os.kill(os.getppid(), number)
            wait_until(lambda count=place: len(received) > count)
            _meet(Path(folder, f"received-{place}"), rank)
        Path(folder, rank).write_text(" ".join(map(str, received)))
        _meet(Path(folder, "written"), rank)  # the launcher stops the other process when one has ended
        sys.exit(143)
    if act == "killed":
        _meet(Path(folder, "here"), rank)  # the launcher stops a process that is still starting when another ends
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        leave_error("Connection closed by peer")  # the error that follows from the other's end
        sys.exit(1)
    if act == "traceback":
        leave_error(f"the traceback of {rank}")
        sys.exit(1)
    if act == "silent" and rank == "1":
        sys.exit(3)
    if act == "reported":
        if reports_failure():
            print("reported once", flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
