"""The processes of reward functions: interruptions, and what ends with them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ebft.reward_functions.calls import RewardWorkers
from ebft.run_files import is_alive
from tests.reward_functions import functions

ROOT = Path(__file__).parents[2]


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupted_call_leaves_no_result_to_the_next():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever tests before left
    pool = RewardWorkers(2, None, lambda: 1)
    call = pool.parallel(functions.sleeps)
    ids = pool.parallel(functions.process_ids)(prompts=["a", "b"])
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(prompts=[60.0, 60.1, 60.2])
    assert time.monotonic() - started < 20 and not any(is_alive(int(process)) for process in ids)
    assert call(prompts=[0.2, 0.3]) == [0.2, 0.3] and time.monotonic() - started < 30, "nothing is tried again"
    pool.close()
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("exit_code", [None, 5])
def test_programs_end_with_the_process_that_started_them(tmp_path, exit_code):
    path, pool = tmp_path / "id", RewardWorkers(1, 2.0, lambda: 1)
    with pytest.warns(UserWarning, match="took longer than 2 s" if exit_code is None else "exit code 5"):
        assert pool.parallel(functions.runs_a_program)(prompts=[str(path)], code=[exit_code]) == [None]
    wait_for(lambda: not is_alive(int(path.read_text())))
    pool.close()


def test_processes_end_with_a_killed_owner(tmp_path):
    code = (
        "from ebft.reward_functions.calls import RewardWorkers\n"
        "from tests.reward_functions import functions\n"
        "if __name__ == '__main__':\n"
        f"    RewardWorkers(1, None, lambda: 1).parallel(functions.waits)(prompts=[{str(tmp_path / 'id')!r}])\n"
    )
    (tmp_path / "owner.py").write_text(code)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    owner = subprocess.Popen([sys.executable, tmp_path / "owner.py"], env={**os.environ, "PYTHONPATH": path})
    wait_for(lambda: (tmp_path / "id").exists() and (tmp_path / "id").read_text())
    owner.kill()
    owner.wait(10)
    worker = int((tmp_path / "id").read_text())
    wait_for(lambda: not is_alive(worker))
