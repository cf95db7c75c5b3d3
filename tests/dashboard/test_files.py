"""Files that grow, are replaced, cut off or removed while they are read."""

import os
import subprocess
import sys

from ebft import run_files
from ebft.printed import duration, printable
from ebft.run_files import JsonTail, Tail, is_alive, read_all, rollout_files, state_of


def test_appended_lines_are_read_once(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read() == ([], False)
    path.write_text("one\ntwo\nthr")
    assert tail.read() == (["one", "two"], True)
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write("ee\nfo")
    assert tail.read() == (["three"], False)
    path.write_text("new\n")  # shorter
    assert tail.read() == (["new"], True)
    (tmp_path / "other").write_text("replaced by a longer file\n")
    os.replace(tmp_path / "other", path)
    assert tail.read() == (["replaced by a longer file"], True)
    path.unlink()
    assert tail.read() == ([], True)
    assert tail.read() == ([], False)


def test_characters_of_several_bytes_may_be_cut_anywhere(tmp_path):
    path, tail, found = tmp_path / "log", Tail(tmp_path / "log"), []
    for byte in "äöü €\n𝄞\n".encode():
        with path.open("ab") as file:
            file.write(bytes([byte]))
        found += tail.read()[0]
    assert found == ["äöü €", "𝄞"]


def test_long_files_are_read_in_parts_or_at_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_CHUNK", 25)
    path = tmp_path / "log"
    path.write_text("".join(f"line {number:04d}\n" for number in range(10)))
    tail, found = Tail(path), []
    for _ in range(10):
        found += tail.read()[0]
    assert found == [f"line {number:04d}" for number in range(10)]
    assert Tail(path, newest_bytes=24).read()[0] == ["line 0008", "line 0009"]
    path.write_text(f"a\n{'long' * 10}\n")  # a line that is longer than what is read at once
    assert Tail(path, newest_bytes=5).read()[0] == ["a"]


def test_corrupted_lines_are_counted(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\n[1]\n\xff\xfe\n{"a": NaN}\n{"a": 2}\n{"a"')
    tail = JsonTail(path)
    rows = tail.read()[0]
    assert [row["a"] for row in rows if row["a"] == row["a"]] == [1, 2] and len(rows) == 3
    assert tail.corrupted == 3
    assert len(list(read_all(path))) == 3 and list(read_all(tmp_path / "none")) == []


def test_rollout_files_are_in_order(tmp_path):
    names = ["rollouts.jsonl.2", "rollouts.jsonl.1", "rollouts.jsonl", "rollouts-rank1.jsonl"]
    left = ["rollouts.jsonl.1.part", "rollouts-rank1.jsonl.part"]  # by a process that was killed
    for name in (*names, "other.jsonl", *left):
        (tmp_path / name).touch()
    assert [path.name for path in rollout_files(tmp_path)] == names


def test_a_process_that_has_ended_is_lost(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    run = {"state": "running", "pid": process.pid, "host": os.uname().nodename}
    while is_alive(process.pid):  # until it is a zombie
        pass
    assert state_of(run) == "lost" and state_of(run | {"host": "elsewhere"}) == "running"
    assert state_of(run | {"state": "finished"}) == "finished" and state_of({}) == "unknown"
    process.wait()
    assert not is_alive(process.pid) and not is_alive(None) and is_alive(os.getpid())


def test_texts():
    seconds = (0.4, 59.4, 65, 3600, 86399, 90000)
    assert [duration(value) for value in seconds] == ["0s", "59s", "1m05s", "1h00m", "23h59m", "1d01h"]
    assert printable("a\x1b[31mred\x07\tx\ny\x7f\x9b") == "a␛[31mred␇\tx\ny␡\ufffd"
    assert printable("a\u202eb\u202c \u2067c\u2069") == "a<RLO>b<PDF> <RLI>c<PDI>"  # they change the direction
