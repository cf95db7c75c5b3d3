"""`ebft train` with use_ray, in the environment of `make test-ray`: numbers of two processes, restarts, signals."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from ebft.tools.launch.ray_control import Control, WorkerFailure
from tests.cli.conftest import plain
from tests.launch.plugins import COMMAND, STEP
from tests.launch.test_plan import config_with
from tests.launch.test_processes import OF_PROCESSES, assert_same_numbers, command, logged, run_file

ray_train = pytest.importorskip("ray.train")

__all__ = ["run_file"]

RAY = ("use_ray=true", "ray_num_workers=2", "resources_per_worker={CPU: 1}")


def train(run_file, out, *words):
    """`ebft train` with one row per process."""
    environment = OF_PROCESSES | {COMMAND: str(out.parent / "command.pid")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(run_file, out, *words), env=environment, cwd=out.parent, **streams) as process:
        Path(environment[COMMAND]).write_text(str(process.pid))
        stdout, stderr = process.communicate(timeout=900)
    # An actor of Ray's that asks for the state of others may fail, if it does so while Ray is stopped.
    own = [line for line in plain(stderr).splitlines(keepends=True) if not line.startswith("(PlacementGroupCleaner")]
    return process.returncode, plain(stdout), "".join(own)


@pytest.mark.slow
def test_two_workers_have_the_numbers_of_two_processes_also_after_one_was_killed(run_file, tmp_path):
    status, stdout, stderr = train(run_file, tmp_path / "ray", *RAY, "ray_run_name=named", "save_steps=100")
    assert status == 0, stderr
    assert "Starting 2 workers with Ray Train on a local Ray (CPU: 1 each)." in stderr
    assert stdout.count("Model saved in") == 1 and "Traceback" not in stderr

    keys = ("auto_resume_from_checkpoints=false", f"save_steps={STEP}", "plugins=[tests.launch.plugins.KilledOnce]")
    status, stdout, stderr = train(run_file, tmp_path / "killed", *RAY, "ray_max_failures=1", *keys)
    assert status == 0, stderr
    assert (tmp_path / "killed" / "killed").exists() and "Attempt 2 of 2, after: " in stderr
    assert stdout.count("Model saved in") == 1
    described = json.loads((tmp_path / "killed" / "run.json").read_text())
    assert (described["state"], described["resumed_from_step"]) == ("finished", STEP)

    status, _, stderr = train(run_file, tmp_path / "two", "--num-processes", "2", "--launcher", "torchrun")
    assert status == 0, stderr
    theirs = logged(tmp_path / "two")
    assert_same_numbers(logged(tmp_path / "ray"), theirs, 1e-6)
    assert_same_numbers(logged(tmp_path / "killed"), theirs, 1e-6)

    result = ray_train.Result.from_path(str(tmp_path / "ray" / "ray" / "named"))
    assert result.metrics["step"] == 4 and result.metrics["loss"] == logged(tmp_path / "ray")[4]["loss"]
    with result.checkpoint.as_directory() as folder:
        assert json.loads(Path(folder, "ebft.json").read_text()) == {"output_dir": str(tmp_path / "ray")}


@pytest.mark.slow
def test_a_signal_to_the_command_stops_all_workers_after_the_same_step(run_file, tmp_path):
    words = (*RAY, "plugins=[tests.launch.plugins.StopsCommand]", "max_steps=100000", "val_set_size=0")
    status, stdout, stderr = train(run_file, tmp_path / "out", *words)
    assert status == 143, stderr
    assert stderr.count("Stopping after this step and saving a checkpoint") == 1
    step = int(re.search(r"Stopped at step (\d+)\. Resume with: ebft train", stderr)[1])
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert step >= STEP and "Traceback" not in stderr and "Model saved" not in stdout


@pytest.mark.slow
def test_an_error_in_one_worker_is_printed_once(run_file, tmp_path):
    status, _, stderr = train(run_file, tmp_path / "out", *RAY, "plugins=[tests.launch.plugins.FailsOnRankOne]")
    assert status == 1, stderr
    assert len(re.findall(r"\bError: ", stderr)) == 1 and "ValueError: rank one is broken" in stderr
    assert "Traceback" not in stderr and "WorkerGroupError" not in stderr


NEWEST = {"resume_from_checkpoint": None, "auto_resume_from_checkpoints": True}


@pytest.mark.parametrize("named, reached, changes", [
    (None, -1, NEWEST), (None, 4, NEWEST),
    ("6", -1, {}),  # killed before the first checkpoint of this run
    ("6", 4, {}),  # of an earlier run
    ("6", 6, NEWEST),  # the named one is in the same folder
    ("6", 8, NEWEST),
])  # fmt: skip
def test_a_restart_continues_from_the_newest_checkpoint_of_this_run(monkeypatch, named, reached, changes):
    from ebft.tools.launch import ray_worker

    monkeypatch.setattr(ray_worker, "_step_reached", lambda config: reached)
    monkeypatch.setattr(ray_worker, "step_of", lambda folder: int(folder.name))
    config = config_with(use_ray=True, resume_from_checkpoint=named)
    assert ray_worker.changes_on_restart(config) == changes


def test_the_first_failure_is_reported_and_those_of_an_earlier_attempt_are_forgotten():
    async def scenario():
        control = Control()
        assert not await control.stop(2)  # there are no workers yet
        control = Control()
        assert (await control.begin()).earlier == 0
        await control.fail(WorkerFailure(0, 1, "of the first attempt", ""))
        await control.note_begun()
        attempt = await control.begin()
        assert (attempt.earlier, attempt.has_begun, attempt.signal) == (1, True, None)
        assert attempt.reason == "of the first attempt"
        await control.fail(WorkerFailure(0, 1, "", "follows", time=2.0))
        await control.fail(WorkerFailure(1, 2, "is first", "", time=1.0))
        assert [failure.rank for failure in await control.failures()] == [1, 0]
        assert await control.stop(15) and await control.wait_for_signal() == 15
        assert (await control.begin()).signal == 15

    asyncio.run(scenario())
