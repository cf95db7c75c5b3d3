"""Jobs in processes of their own: results, errors, ended processes."""

import os
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
