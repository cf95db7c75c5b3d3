"""Looking at processes from outside."""

import socket
import time

import psutil


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(condition, seconds=60):
    """Whether `condition()` becomes true in time; its value then."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def pids_in(path):
    """The process ids that a stand-in wrote, once it has."""
    assert eventually(path.exists)
    return [int(word) for word in path.read_text().split()]


def alive(pids):
    """Those of `pids` that run; a dead one that nobody has asked about yet does not."""
    found = [process for process in psutil.process_iter(["status"]) if process.pid in pids]
    return [process.pid for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]
