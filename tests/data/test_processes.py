"""How the processes of a transform end: after an interruption, after two, and when one is killed."""

import errno
import os
import signal
import time
from pathlib import Path

import multiprocess
import pytest
from datasets import Dataset, config, load_from_disk

from ebft.data.tables import discard_tables, forked_processes, map_rows, shuffle_rows
from ebft.errors import DataError

ROWS = Dataset.from_list([{"number": number} for number in range(100)])


class Stop(KeyboardInterrupt):
    """What a handler of signals raises."""


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 0.04)])
def test_an_interruption_is_raised_and_leaves_no_process(seconds):
    """After so many seconds, and again after the next."""
    first, *later = seconds

    def stop(*_):
        signal.setitimer(signal.ITIMER_REAL, later.pop(0) if later else 0)
        raise Stop

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, first)
        with pytest.raises(Stop), forked_processes():
            ROWS.map(lambda row: time.sleep(0.5) or row, num_proc=2, load_from_cache_file=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    for process in multiprocess.active_children():  # those that were killed end at once
        process.join(5)
    assert multiprocess.active_children() == []


def killed(row):
    if row["number"] == 70:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def test_a_killed_process_is_said_to_be_one():
    with pytest.raises(DataError, match="was killed, .* memory ran out. Reduce dataset_num_proc"), forked_processes():
        ROWS.map(killed, num_proc=2, load_from_cache_file=False)
    with pytest.raises(RuntimeError, match="^its own$"), forked_processes():  # errors of other causes are unchanged
        raise RuntimeError("its own")
    with pytest.raises(DataError, match=r"rows cannot be written to .*no room.* HF_DATASETS_CACHE"):
        map_rows(ROWS, full)


def handlers(row):
    return {"sigint": repr(signal.getsignal(signal.SIGINT)), "sigterm": repr(signal.getsignal(signal.SIGTERM))}


def test_signals_of_processes():
    """Ctrl-C is left to this process; SIGTERM ends idle ones, which a handler in Python may never do."""
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with forked_processes():
            found = ROWS.map(handlers, num_proc=2, load_from_cache_file=False)
        outside = ROWS.map(handlers, num_proc=2, load_from_cache_file=False)  # other processes are as they were
        assert set(outside["sigint"]) == {repr(signal.getsignal(signal.SIGINT))}
        assert repr(signal.SIG_DFL) not in outside["sigterm"]
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert set(found["sigint"]) == {repr(signal.SIG_IGN)} and set(found["sigterm"]) == {repr(signal.SIG_DFL)}


def full(row):
    raise OSError(errno.ENOSPC, "no room")


def test_only_files_of_this_process_are_deleted(tmp_path):
    ROWS.save_to_disk(str(tmp_path))
    raw = load_from_disk(str(tmp_path))
    rows = map_rows(raw, lambda row: {"twice": 2 * row["number"]}, num_proc=2)
    files = [Path(file["filename"]) for file in rows.cache_files]
    assert files and all(file.is_relative_to(config.HF_DATASETS_CACHE) for file in files)
    assert sorted(shuffle_rows(rows, seed=0)["twice"]) == rows["twice"][:] == [2 * number for number in range(100)]
    discard_tables(raw)
    discard_tables(rows)
    assert not any(file.exists() for file in files) and not list(tmp_path.glob("cache-*"))
    assert len(load_from_disk(str(tmp_path))) == 100
