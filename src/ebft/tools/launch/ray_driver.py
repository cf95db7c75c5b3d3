"""Running Ray Train from `ebft train`: connecting to Ray, starting the workers, passing on signals, one error."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft.errors import ConfigError, LaunchError, cause, doing
from ebft.machine import passed_on, received_signals
from ebft.printed import say
from ebft.run.config.schema import RunConfig
from ebft.tools.launch.agent import in_thread
from ebft.tools.launch.plan import RAY_ADDRESS, uses_cluster
from ebft.tools.launch.ray_control import SETUP, Control, RunOutcome, WorkerTask, train_in_worker

DEBUG = "EBFT_DEBUG"
FOLDER = "ray"  # in output_dir: what Ray stores about the run
# Read by Ray when it is imported or started; values that the user has set are kept.
_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the config start at the folder of the command
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # which turns output that packages capture into log messages
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a report waits for the next check, by default up to 2 seconds
}
# For a Ray that is started here.
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on 127.0.0.1, on every system
    "RAY_TRAIN_METRICS_ENABLED": "0",  # nothing collects them
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # this machine does not announce that it is taken away
}
_BARS = ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
_OBJECT_STORE = 100 * 2**20  # bytes; nothing but the config passes through it
_PROMPT = 30.0  # seconds in which the control actor answers
_KILLED = 128 + signal.SIGKILL


def train_with_ray(
    config: RunConfig, values: dict[str, Any], command: list[str], evaluate: str | None
) -> tuple[RunOutcome, Any]:
    """Train in Ray workers with the config that `values` describe; returns the `RunOutcome` and the Result of Ray.

    Raises LaunchError if the workers cannot be started, fail or are killed, KeyboardInterrupt if a signal arrives
    before they have started.
    """
    with connected(config):
        import ray

        resources = worker_resources(config, ray.cluster_resources())
        control = ray.remote(num_cpus=0)(Control).remote()
        task = WorkerTask(values, command, evaluate, os.getcwd(), control)
        trainer = _trainer(config, resources, lambda: train_in_worker(task))
        with received_signals() as received:
            return _fit(trainer, control, received)


@contextlib.contextmanager
def connected(config: RunConfig) -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS or start a local Ray, unless there is a connection, and leave it again."""
    variables = dict(_ENVIRONMENT)
    if not uses_cluster():
        # A token of this run alone: otherwise Ray creates one in the home folder, for all clusters.
        variables |= _LOCAL | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    if not sys.stderr.isatty():
        variables["RAY_COLOR_PREFIX"] = "0"
    os.environ |= variables | os.environ
    import ray

    if ray.is_initialized():
        yield
        return
    where = f"the cluster at {RAY_ADDRESS}={os.environ[RAY_ADDRESS]}" if uses_cluster() else "a local Ray"
    try:
        with doing(f"connecting to {where} (use_ray)"):
            options: dict[str, Any] = {"address": os.environ.get(RAY_ADDRESS)}
            if not uses_cluster():
                each = 1.0 if config.resources_per_worker is None else config.resources_per_worker.get("CPU", 0.0)
                # The CPUs of the machine, or more, so that any number of processes can be tested.
                cpus = max(os.cpu_count() or 1, math.ceil(each * config.ray_num_workers))
                options = {"address": "local", "num_cpus": cpus, "object_store_memory": _OBJECT_STORE}
                options["include_dashboard"] = False
            ray.init(**options, runtime_env={"worker_process_setup_hook": SETUP}, logging_level="error")
    except SystemExit:  # of Ray's handler of SIGTERM
        raise KeyboardInterrupt("Interrupted before training started; nothing was saved.") from None
    try:
        yield
    finally:
        ray.shutdown()


def worker_resources(config: RunConfig, available: dict[str, float]) -> dict[str, float]:
    """The resources of a worker. Raises ConfigError if a local Ray, which does not grow, has too few."""
    resources = config.resources_per_worker
    if resources is None:
        resources = {"GPU": 1.0} if available.get("GPU") else {"CPU": 1.0}
    wanted = {name: amount * config.ray_num_workers for name, amount in resources.items()}
    lacking = [(name, amount) for name, amount in wanted.items() if amount > available.get(name, 0)]
    needed = ", ".join(f"{name}: {amount:g} (available: {available.get(name, 0):g})" for name, amount in lacking)
    if not needed:
        return resources
    if not uses_cluster():
        raise ConfigError(
            f"resources_per_worker: {config.ray_num_workers} workers need {needed}. Reduce it, or ray_num_workers."
        )
    say(f"The cluster has too few resources so far, and training waits for them: {needed}.", err=True)
    return resources


def _trainer(config: RunConfig, resources: dict[str, float], function: Any) -> Any:
    from ray.train import FailureConfig, LoggingConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    variables = dict.fromkeys(_BARS, "1")  # workers have no terminal
    if DEBUG in os.environ:
        variables[DEBUG] = os.environ[DEBUG]
    if not resources.get("GPU"):
        variables["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all GPUs visible to workers without one
    return TorchTrainer(
        function,
        torch_config=TorchConfig(timeout_s=config.ddp_timeout),
        scaling_config=ScalingConfig(
            num_workers=config.ray_num_workers, use_gpu=bool(resources.get("GPU")), resources_per_worker=resources
        ),
        run_config=RayRunConfig(
            name=config.ray_run_name,
            storage_path=str(Path(config.output_dir).absolute() / FOLDER),
            failure_config=FailureConfig(max_failures=config.ray_max_failures),
            worker_runtime_env={"env_vars": variables},
            logging_config=LoggingConfig(log_level="CRITICAL"),  # errors are printed here, once
        ),
    )


def _fit(trainer: Any, control: Any, received: list[int]) -> Any:
    """Run the trainer, and pass signals on to the workers. Raises KeyboardInterrupt if there are no workers yet."""
    import ray

    seen: list[int] = []

    def look() -> None:
        for number in received[len(seen) :]:
            seen.append(number)
            if len(seen) == 1:
                if not ray.get(control.stop.remote(passed_on(number)), timeout=_PROMPT):
                    raise KeyboardInterrupt("Interrupted before training started; nothing was saved.")
                text = "Stopping after this step and saving a checkpoint. Press Ctrl-C again to stop immediately."
                say(f"\n{text}", err=True)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt("Stopped immediately; steps after the newest checkpoint are lost.")

    ended = in_thread(trainer.fit, look)
    if isinstance(ended, BaseException):
        _raise(ended, control)
    return ended.return_value, ended


def _raise(error: BaseException, control: Any) -> None:
    """Raise the LaunchError for an exception of Ray Train: a killed worker, or else the first error of any worker."""
    import ray
    from ray.train import WorkerGroupError

    failures = ray.get(control.failures.remote(), timeout=_PROMPT)
    failed = {failure.rank for failure in failures}
    killed = sorted(set(error.worker_failures) - failed) if isinstance(error, WorkerGroupError) else []
    if killed:  # the errors of the others follow from it
        rank = killed[0]
        why = cause(error.worker_failures[rank])
        raise LaunchError(f"The Ray worker of rank {rank} was killed (out of memory?): {why}", _KILLED) from error
    if not failures:
        raise LaunchError(f"Ray Train failed: {cause(error)}") from error
    first = failures[0]
    if os.environ.get(DEBUG):
        say(f"\nThe Ray worker of rank {first.rank} failed:\n{first.traceback}", err=True)
    raise LaunchError(first.message, status=first.status) from error
