"""Calls of user code: the line about one that takes long."""

import os
import re
import threading
import time

import pytest

from ebft.config import user_code
from ebft.config.user_code import watched


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(user_code, "FIRST", 0.1)
    monkeypatch.setattr(user_code, "AGAIN", 0.3)


def test_a_long_call_is_named_again_and_again(capsys):
    for _ in range(3):
        with pytest.raises(KeyError), watched("A short call that raises"):
            raise KeyError
    with watched("The reward function my_rewards.score", hint="Press Ctrl-C."):
        time.sleep(0.6)
    lines = capsys.readouterr().err.splitlines()
    pattern = r"The reward function my_rewards.score has been running for \d s, since \d\d:\d\d:\d\d. Press Ctrl-C."
    assert len(lines) == 2 and all(re.fullmatch(pattern, line) for line in lines)


def test_nested_calls_and_those_of_other_threads_are_named_each(capsys):
    def run(name):
        with watched(f"Outer {name}"), watched(lambda: f"Inner {name}"):
            time.sleep(0.25)

    threads = [threading.Thread(target=run, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {line.split(" has")[0] for line in capsys.readouterr().err.splitlines()}
    assert found == {"Inner a", "Inner b", "Outer a", "Outer b"}


def test_a_subject_that_raises_does_not_end_the_thread(capsys):
    with watched(lambda: 1 / 0):
        time.sleep(0.2)
    with watched("The next call"):
        time.sleep(0.2)
    assert "The next call has been running" in capsys.readouterr().err


def test_a_forked_process_names_its_own_calls(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with watched("The parent's call"):
        child = os.fork()
        if child == 0:
            with watched("The child's call"):
                time.sleep(0.25)
            os._exit(0)
        os.waitpid(child, 0)
    lines = [line.split(" has")[0] for line in capfd.readouterr().err.splitlines()]
    assert set(lines) == {
        "Rank 3: The child's call",
        "Rank 3: The parent's call",
    }  # perhaps again, if the fork takes long
