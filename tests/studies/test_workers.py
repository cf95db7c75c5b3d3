"""Jobs in processes of their own: results, errors, ended processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workers import run_all


def work(job: int) -> int:
    """Each kind of outcome."""
    print(f"job {job}")
    if job == 2:
        raise ValueError("no twos")
    if job == 3:
        os._exit(7)
    return job * 10


@pytest.mark.parametrize("count", [1, 2])
def test_errors_and_ended_processes_stop_no_other_job(tmp_path, count):
    log_of = lambda job: tmp_path / "logs" / f"{job}.txt"
    found = {job: (result, error) for job, result, error in run_all(range(6), work, count, log_of)}
    assert found[2] == (None, "ValueError: no twos")
    assert found[3][0] is None and "status 7" in found[3][1]
    assert [found[job] for job in (0, 1, 4, 5)] == [(0, None), (10, None), (40, None), (50, None)]
    assert "job 1" in log_of(1).read_text() and "no twos" in log_of(2).read_text()


def test_no_process_works_here(tmp_path):
    assert list(run_all([1, 2], work, 0, lambda job: Path(tmp_path))) == [
        (1, 10, None),
        (2, None, "ValueError: no twos"),
    ]


def stay(folder: Path) -> None:
    """Say who works, and work for long."""
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(120)


def test_workers_end_with_a_run_that_is_killed(tmp_path):
    here = Path(__file__)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from pathlib import Path; import test_workers\n"
        "if __name__ == '__main__': list(test_workers.run_all([Path(sys.argv[3])], test_workers.stay, 1, "
        "lambda job: job / 'log.txt'))"
    )
    (tmp_path / "main.py").write_text(code)
    folders = [str(here.parent), str(here.parents[2] / "studies" / "smollm2"), str(tmp_path)]
    run = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), *folders])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    worker = int((tmp_path / "pid").read_text())
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: not is_running(worker))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # an ended child of an ended parent may wait for somebody to notice
    return not (status.exists() and status.read_text().split()[2] == "Z")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
