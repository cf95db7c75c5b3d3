"""Starting, waiting, watching and stopping, on a stand-in with the processes of a server, and its log."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from ebft.errors import ServerError
from ebft.serving.server import TAIL_LINES, ServerLog
from tests.serving.conftest import STAND_IN
from tests.serving.processes import alive, eventually, free_port, pids_in


def test_from_start_to_stop(make_server, pids, monkeypatch, capfd):
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "SOMETHING_ELSE"):  # the first two are for the trainer
        monkeypatch.setenv(name, "1")
    server = make_server()
    with server:
        server.wait_until_healthy(20)
        assert server.failure is None
        started = pids_in(pids)
        assert len(alive(started)) == 2
        names = psutil.Process(started[0]).environ()
        assert "SOMETHING_ELSE" in names and "RANK" not in names and "TORCHELASTIC_RUN_ID" not in names
        first, *rest = server.log.path.read_text().splitlines()
        assert first.startswith("$ ") and str(STAND_IN) in first and "stand-in: started" in rest
        if (child := os.fork()) == 0:
            server.stop()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(alive(started)) == 2, "a fork does not take the server along"
    assert alive(started) == []
    server.stop()
    with server:  # again
        server.wait_until_healthy(20)
        server.watch()
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        began = time.monotonic()
    assert time.monotonic() - began < 10, "a fork that goes on does not keep the server"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    time.sleep(1)
    assert alive(pids_in(pids)) == [] and server.failure is None, "a stop is no death"
    assert capfd.readouterr().err == ""


def test_an_early_end_is_told_at_once_with_the_end_of_the_log(make_server):
    started = time.monotonic()
    with make_server("--exit", "3") as server, pytest.raises(ServerError) as caught:
        server.wait_until_healthy(300)
    assert time.monotonic() - started < 30
    message = str(caught.value)
    assert "exit code 3" in message and "stand-in: no memory left" in message and str(server.log.path) in message
    assert "$ " not in message


def test_wait_tells_an_end_by_itself_and_returns_after_stop(make_server, pids):
    with make_server() as server:
        server.wait_until_healthy(20)
        os.kill(pids_in(pids)[0], signal.SIGKILL)
        with pytest.raises(ServerError, match=r"exited unexpectedly \(exit code 137\)"):
            server.wait()
    with make_server() as server:
        threading.Timer(0.5, server.stop).start()
        server.wait()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_an_error_before_anything_starts(make_server, pids, host):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, 0))
        other.listen()
        server = make_server(port=other.getsockname()[1])
        with pytest.raises(OSError, match="already in use") as caught:
            server.start()
        assert f"vllm.port {server.command.port}" in caught.value.__notes__[0]
    assert not pids.exists()


def test_a_death_is_noticed_and_the_server_is_started_again(make_server, pids, capfd):
    with make_server() as server:
        server.wait_until_healthy(20)
        server.watch()
        first = pids_in(pids)
        pids.unlink()
        os.kill(first[0], signal.SIGKILL)
        second = pids_in(pids)
        server.wait_until_healthy(20)
        assert set(first).isdisjoint(second) and alive(first) == []
    assert alive(second) == []
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "exit code 137" in lines[0] and "is restarted" in lines[0]


def test_watching_gives_up(make_server, capfd):
    with make_server("--exit", "3") as server:
        server.watch()
        with pytest.raises(ServerError, match="3 times within 10 minutes(.|\n)*no memory left"):
            server.wait_until_healthy(60)
        assert "3 times" in server.failure
    assert capfd.readouterr().err.count("is restarted") == 3


PROGRAM = """
import os, signal, sys, time
from ebft.serving.command import ServerCommand
from ebft.serving.server import VLLMServer
stand_in, pids, log, port, end = sys.argv[1:]
command = (sys.executable, stand_in, pids, "--port", port)
server = VLLMServer(ServerCommand(command, {}, "model", "127.0.0.1", int(port)), log)
server.start()
server.wait_until_healthy(20)
if "fork" in end and os.fork() == 0:
    time.sleep(40)
    os._exit(0)
if "killed" in end:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["returns", "killed", "killed beside a fork"])
def test_a_program_that_ends_takes_the_server_along(pids, tmp_path, end):
    arguments = [str(STAND_IN), str(pids), str(tmp_path / "log"), str(free_port()), end]
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], timeout=60)
    assert eventually(lambda: not alive(pids_in(pids)))


def test_the_tail_is_of_the_present_start(tmp_path):
    log = ServerLog(tmp_path / "new" / "folder" / "log")
    with log.open(["first"]) as file:
        file.write(b"old\n")
    with log.open(["second", "a b"]) as file:
        assert log.tail() == f"Its log {log.path} is empty."
        file.write(b"".join(b"line %d\n" % number for number in range(100)))
    first, *lines = log.tail().splitlines()
    assert str(log.path) in first
    assert len(lines) == TAIL_LINES and lines[-1] == "  line 99"
    assert "$ second 'a b'\n" in log.path.read_text()
