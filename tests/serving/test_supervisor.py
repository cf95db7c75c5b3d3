"""Whatever happens to parent, supervisor or server: no process is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.serving.conftest import STAND_IN
from tests.serving.processes import alive, eventually, pids_in

# The stand-in that ignores SIGTERM would take ten seconds with the supervisor's own patience.
IMPATIENT = "import sys; from ebft.serving import supervisor as s; s.GRACE = 0.5; sys.exit(s.main(sys.argv[1:]))"


@pytest.fixture
def start(pids):
    """`start("--deaf")`: a supervisor over a stand-in, ended after the test."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-c", IMPATIENT, "--", sys.executable, str(STAND_IN), str(pids), *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def closed(supervisor, pids):
    supervisor.stdin.close()


def signalled(number):
    return lambda supervisor, pids: supervisor.send_signal(number)


@pytest.mark.parametrize(("arguments", "end", "code"), [
    ([], closed, 128 + signal.SIGTERM),
    (["--deaf"], closed, 128 + signal.SIGKILL),
    ([], signalled(signal.SIGTERM), 128 + signal.SIGTERM),
    ([], signalled(signal.SIGINT), 128 + signal.SIGTERM),
    ([], lambda supervisor, pids: os.kill(pids[0], signal.SIGKILL), 128 + signal.SIGKILL),
    (["--exit", "3"], lambda *_: None, 3),  # the server's own code
])  # fmt: skip
def test_whatever_ends_ends_all(start, pids, arguments, end, code):
    supervisor = start(*arguments)
    started = pids_in(pids)
    if end is closed:
        supervisor.stdin.write(b"anything")  # does not end it
        supervisor.stdin.flush()
        time.sleep(0.5)
        assert len(alive(started)) == 2 and supervisor.poll() is None
    end(supervisor, started)
    assert supervisor.wait(20) == code
    assert alive(started) == []


def test_a_killed_guard_asks_the_server_to_end(start, pids):
    supervisor = start()
    server, child = pids_in(pids)
    supervisor.kill()
    assert eventually(lambda: not alive([server]))
    os.kill(child, signal.SIGKILL)  # a server ends its own workers when asked to; the stand-in does not
