"""Server processes: vLLM with health checks and restarts, the supervisor that ends with us, and logs."""

from __future__ import annotations

import atexit
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from ebft import errors, machine, printed
from ebft.config.keys.serving import check_free
from ebft.serving.command import ServerCommand
from ebft.serving.supervisor import GRACE, LAST_WAIT

DEFAULT_TIMEOUT = 600.0  # seconds until a server is ready; loading and compiling a large model takes minutes
MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # maximum number of restarts within this many seconds
PAUSE = 0.2  # polling interval in seconds
ANSWER_TIMEOUT = 5.0  # timeout of a health check in seconds

# Variables that launchers set for each trainer process. vLLM would interpret them as its own distributed setup.
LAUNCHER_VARIABLES = {*machine.LAUNCHER, "LOCAL_WORLD_SIZE"}
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


class VLLMServer:
    """A server process and its child processes, which all terminate with the current process at the latest.

    Ctrl-C in the terminal does not reach the server; it is stopped through this object only. Used as a context
    manager, it is started and stopped with the block. All methods are thread-safe.
    """

    def __init__(self, command: ServerCommand, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to the current process's; variables of `command` take precedence over both."""
        self.command = command
        self.log: ServerLog = ServerLog(Path(log))
        self.failure: str | None = None  # why the server is not restarted any more
        self._environment = dict(environment or {})
        self._process: subprocess.Popen | None = None
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._owner = os.getpid()

    def start(self) -> None:
        """Start the process; raises ConfigError if the port is in use."""
        with self._lock:
            self.failure = None
            self._stopping.clear()
            self._launch()
        atexit.register(self.stop)

    def wait_until_healthy(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Block until the server is ready, including after a restart by `watch`.

        Raises ServerError, with the end of the log, if the process exits and is not restarted, or after `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            process = self._process
            self._check_alive(process, "before it was ready")
            if self._stopping.is_set() or process is None:
                raise errors.ServerError("The vLLM server is not running.")
            if self._answers(process):
                return
            if time.monotonic() > deadline:
                raise errors.ServerError(
                    f"vLLM was not ready at {self.command.url} within {timeout:g} seconds. Increase "
                    f"trl.vllm_server_timeout if it needs more time. {self.log.tail()}"
                )
            self._stopping.wait(PAUSE)

    def wait(self) -> None:
        """Block until `stop` is called; raises ServerError, with the end of the log, if the server exits by itself."""
        while not self._stopping.wait(PAUSE):
            self._check_alive(self._process, "unexpectedly")

    def _check_alive(self, process: subprocess.Popen | None, when: str) -> None:
        failure = self.failure
        if failure is None and process is not None and process.poll() is not None and self._watcher is None:
            failure = self._ended(process, when)
        if failure is not None:
            raise errors.ServerError(failure)

    def watch(self) -> None:
        """Restart the server, then without adapters, from now on if it exits, with a line on standard error each time.

        After three restarts within ten minutes, or if a restart fails, the server is not restarted any more and
        `failure` contains the reason.
        """
        with self._lock:
            self._watcher = threading.Thread(target=self._watch, name="vllm-watcher", daemon=True)
            self._watcher.start()

    def stop(self) -> None:
        """Stop the server and all of its child processes; does nothing if it is not running."""
        if os.getpid() != self._owner:
            return  # a fork of this process must not stop the server when it exits
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                end_supervisor(self._process)
            self._process = None
            watcher, self._watcher = self._watcher, None
        atexit.unregister(self.stop)
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(ANSWER_TIMEOUT + 1)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _launch(self) -> None:
        check_free(self.command.host, self.command.port)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
        }
        environment = {**inherited, **self._environment, **self.command.environment}
        self._process = start_supervisor(self.command.command, self.log, env=environment)

    def _answers(self, process: subprocess.Popen) -> bool:
        if process.poll() is not None:
            return False  # a response from that address would be from another server
        import httpx2  # runs without a server need no HTTP client

        try:
            return httpx2.get(f"{self.command.url}/health", timeout=ANSWER_TIMEOUT, trust_env=False).status_code == 200
        except httpx2.RequestError:
            return False

    def _ended(self, process: subprocess.Popen, when: str = "unexpectedly") -> str:
        return f"vLLM exited {when} (exit code {process.poll()}). {self.log.tail()}"

    def _watch(self) -> None:
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        while not self._stopping.wait(PAUSE):
            process = self._process
            if process is None or process.poll() is None:
                continue
            try:
                self._restart(process, restarts)
            except Exception as error:  # an exception on this thread would go unnoticed while callers wait
                with self._lock:
                    if not self._stopping.is_set():
                        self.failure = str(error) if isinstance(error, errors.EBFTError) else errors.told(error)
                        end_supervisor(self._process)
                        printed.say(f"vLLM is not restarted: {self.failure}", err=True)
                return

    def _restart(self, dead: subprocess.Popen, restarts: deque[float]) -> None:
        now = time.monotonic()
        if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW:
            minutes = f"{RESTART_WINDOW / 60:g} minutes"
            raise errors.ServerError(f"vLLM was restarted {MAX_RESTARTS} times within {minutes}. {self._ended(dead)}")
        restarts.append(now)
        with self._lock:
            if self._stopping.is_set():
                return
            how = f"unexpectedly (exit code {dead.poll()}) and is restarted. See its log {self.log.path}"
            printed.say(f"vLLM exited {how}", err=True)
            self._launch()


def start_supervisor(command: Sequence[str], log: ServerLog, **options: Any) -> subprocess.Popen:
    """Start a server whose processes end with this one at the latest; `options` go to Popen."""
    with log.open(command) as file:
        return subprocess.Popen(
            [sys.executable, "-m", "ebft.serving.supervisor", "--", *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )


def end_supervisor(supervisor: subprocess.Popen) -> None:
    """Make the supervisor stop its server, and wait for it."""
    supervisor.stdin.close()
    supervisor.terminate()  # forks of this process, such as data loader workers, may keep its standard input open
    try:
        supervisor.wait(GRACE + LAST_WAIT + 1)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


TAIL_LINES = 20
TAIL_BYTES = 65536
# Uninformative lines that a server writes when it exits.
_NOISE = ("nanobind:", " - leaked ", "resource_tracker", "(...)")
LOG_PAUSE = 0.2  # polling interval in seconds


class ServerLog:
    """A log file that each start of the server appends to; `tail` and `follow` read the part of the current start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0

    def open(self, command: Sequence[str]) -> BinaryIO:
        """Open the file for a new start of the server and write the command as the first line."""
        with errors.doing(f"writing the server's log {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab")
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self.start: int = file.tell()
        return file

    def tail(self) -> str:
        """Return the last lines, indented, preceded by the path of the file."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self.start, end - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        lines = [line for line in lines if not any(noise in line for noise in _NOISE)][-TAIL_LINES:]
        if not lines:
            return f"Its log {self.path} is empty."
        return "\n  ".join([f"Last lines of its log {self.path}:", *lines])

    def follow(self, stream: TextIO, ended: threading.Event) -> None:
        """Copy the log of the current start to `stream` until `ended` is set and everything has been copied."""
        with self.path.open("r", encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            while True:
                last = ended.wait(LOG_PAUSE)
                stream.write(file.read())
                stream.flush()
                if last:
                    return


LOG = "vllm.log"


def await_ready(server: VLLMServer, timeout: float | None) -> None:
    """Wait until the server is ready, and restart it from then on if it exits."""
    server.wait_until_healthy(timeout or DEFAULT_TIMEOUT)
    server.watch()
