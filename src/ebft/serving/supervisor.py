"""Runs a server and terminates all of its processes with it: `python -m ebft.serving.supervisor -- COMMAND...`.

The server runs in a separate process group. The whole group is terminated at the end of standard input (the parent
holds the other end, so this also detects that the parent was killed), on SIGTERM or SIGINT, and when the server exits,
since its worker processes may keep running. Uses the standard library only, to keep its memory usage small.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds between SIGTERM and SIGKILL
LAST_WAIT = 5.0  # seconds for killed processes to disappear
PAUSE = 0.1  # polling interval in seconds
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # options of Linux's prctl


def main(arguments: list[str]) -> int:
    """Run the command after `--`; returns its exit code, or 128 plus the number of the signal that terminated it."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: asked.append(received))
    # Adopt workers whose parent exited, so that they can be reaped and are not counted as alive afterwards.
    _prctl(SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    # If the supervisor is killed, the server gets SIGTERM.
    with_parent = lambda: _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": with_parent}
    server = subprocess.Popen(arguments[1:], **options)
    is_open = True
    while server.poll() is None and not asked and os.getppid() == parent and is_open:
        readable, _, _ = select.select([0], [], [], PAUSE)
        is_open = not readable or bool(os.read(0, 4096))  # data written to it is ignored
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, LAST_WAIT)):
        deadline = time.monotonic() + patience
        if not _group_is_gone(server):
            os.killpg(server.pid, number)
        while not _group_is_gone(server) and time.monotonic() < deadline:
            time.sleep(PAUSE)
    code = server.poll()
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


def _group_is_gone(server: subprocess.Popen) -> bool:
    if server.poll() is None:
        return False
    try:
        while os.waitpid(-server.pid, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return True
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
