"""The end of a log, and a copy of it as it grows."""

import io
import threading

import pytest

from ebft.errors import ConfigError
from ebft.serving.server import TAIL_LINES, ServerLog


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


def test_following_copies_to_the_end(tmp_path):
    log, stream, ended = ServerLog(tmp_path / "log"), io.StringIO(), threading.Event()
    with log.open(["command"]) as file:
        thread = threading.Thread(target=log.follow, args=(stream, ended))
        thread.start()
        file.write(b"one\n")
        file.flush()
        file.write(b"two\n")
    ended.set()
    thread.join(10)
    assert stream.getvalue() == "one\ntwo\n"


def test_a_file_of_the_user_is_kept(tmp_path):
    (tmp_path / "vllm.log").write_text("mine")
    with pytest.raises(ConfigError, match="vllm.log is not the log of a server, and is kept"):
        ServerLog(tmp_path / "vllm.log").open(["vllm"])
    assert (tmp_path / "vllm.log").read_text() == "mine"
