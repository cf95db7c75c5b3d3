"""Runs a server and ends all of its processes with it: `python -m ebft.serving.supervisor -- COMMAND...`.

The server gets a process group of its own. All of the group ends when standard input reaches its end (the parent holds
the other side, so this is also how its sudden death shows), on SIGTERM or SIGINT, and when the server itself ends,
since its worker processes may go on without it. Standard library only, as it must stay small beside a large server.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds between SIGTERM and SIGKILL
LAST_WAIT = 5.0  # seconds for the system to take away what was killed
PAUSE = 0.1  # seconds between two looks
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # options of Linux's prctl


def main(arguments: list[str]) -> int:
    """Run the command after `--`; the exit code is the server's, 128 plus its number where a signal ended it."""
    if len(arguments) < 2 or arguments[0] != "--":
        print("Usage: python -m ebft.serving.supervisor -- COMMAND... (ends with its standard input)", file=sys.stderr)
        return 2
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: asked.append(received))
    # Workers whose parent died become ours, so that the dead among them can be taken away and do not count as alive.
    _prctl(SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    try:
        server = subprocess.Popen(
            arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_the_guard
        )
    except OSError as error:
        print(f"{arguments[1]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127
    while server.poll() is None and not asked and os.getppid() == parent and _input_is_open():
        pass
    _end_group(server)
    code = server.poll()
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


def _input_is_open() -> bool:
    """Waits a moment for the end of standard input; what is written to it does not matter."""
    readable, _, _ = select.select([0], [], [], PAUSE)
    return not readable or bool(os.read(0, 4096))


def _end_group(server: subprocess.Popen) -> None:
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, LAST_WAIT)):
        deadline = time.monotonic() + patience
        if _group_is_gone(server):
            return
        os.killpg(server.pid, number)
        while not _group_is_gone(server) and time.monotonic() < deadline:
            time.sleep(PAUSE)


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


def _end_with_the_guard() -> None:
    """In the server, before it starts: if even the supervisor is killed, the server is asked to end."""
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
