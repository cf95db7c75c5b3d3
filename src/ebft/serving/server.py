"""A vLLM server process: starting, health checks, restarts and stopping."""

import atexit
import http.client
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from ebft.errors import EBFTError, ServerError
from ebft.printed import say
from ebft.serving.address import check_free, reachable_host
from ebft.serving.command import ServerCommand
from ebft.serving.log import ServerLog
from ebft.serving.supervisor import GRACE, LAST_WAIT

DEFAULT_TIMEOUT = 600.0  # seconds until a server is ready; loading and compiling a large model takes minutes
MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # maximum number of restarts within this many seconds
PAUSE = 0.2  # polling interval in seconds
ANSWER_TIMEOUT = 5.0  # timeout of a health check in seconds

# Variables that launchers set for each trainer process. vLLM would interpret them as its own distributed setup.
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


class VLLMServer:
    """A server process and its child processes, which all terminate with the current process at the latest.

    Ctrl-C in the terminal does not reach the server; it is stopped through this object only. Used as a context
    manager, it is started and stopped with the block. All methods are thread-safe.
    """

    def __init__(self, command: ServerCommand, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to that of the current process; variables of `command` take precedence over both."""
        self.command = command
        self.log: ServerLog = ServerLog(Path(log))
        self.failure: str | None = None  # why the server is not restarted any more
        self._environment = dict(environment or {})
        self._process: subprocess.Popen | None = None
        self._watcher: threading.Thread | None = None
        self._ready: subprocess.Popen | None = None  # the process that passed a health check
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """The URL of the server for clients on this machine, such as http://127.0.0.1:8000."""
        return self.command.url

    @property
    def healthy(self) -> bool:
        """Whether the server has become ready since its last start and is still running."""
        process = self._process
        return process is not None and process is self._ready and process.poll() is None

    def start(self) -> None:
        """Start the process; raises ConfigError if the port is in use or the log is not writable."""
        with self._lock:
            if self._process is not None:
                raise RuntimeError("The server is already started.")
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
            if self.failure is not None:
                raise ServerError(self.failure)
            if self._stopping.is_set() or process is None:
                raise ServerError("The vLLM server is not running. Start it before waiting for it.")
            if self._answers(process):
                self._ready = process
                return
            if process.poll() is not None and self._watcher is None:
                raise ServerError(self._ended(process, "before it was ready"))
            if time.monotonic() > deadline:
                raise ServerError(
                    f"vLLM was not ready at {self.url} within {timeout:g} seconds. Increase trl.vllm_server_timeout if "
                    f"it needs more time. {self.log.tail()}"
                )
            self._stopping.wait(PAUSE)

    def wait(self) -> None:
        """Block until `stop` is called; raises ServerError, with the end of the log, if the server exits by itself."""
        while not self._stopping.wait(PAUSE):
            if self.failure is not None:
                raise ServerError(self.failure)
            process = self._process
            if process is not None and process.poll() is not None and self._watcher is None:
                raise ServerError(self._ended(process))

    def watch(self, on_restart: Callable[[], None] | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Restart the server from now on if it exits, with a line on standard error each time.

        `on_restart` is called in the watching thread when the new server, which has no adapters, is ready. After three
        restarts within ten minutes, or if a restart fails, the server is not restarted any more and `failure` contains
        the reason.
        """
        with self._lock:
            if self._watcher is not None:
                raise RuntimeError("The server is already being watched.")
            self._watcher = threading.Thread(
                target=self._watch, args=(on_restart, timeout), name="vllm-watcher", daemon=True
            )
            self._watcher.start()

    def stop(self) -> None:
        """Stop the server and all of its child processes; does nothing if it is not running."""
        if os.getpid() != self._owner:
            return  # a fork of this process must not stop the server when it exits
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                end_supervisor(self._process)
            self._process, self._ready = None, None
            watcher, self._watcher = self._watcher, None
        atexit.unregister(self.stop)
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(ANSWER_TIMEOUT + 1)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self) -> None:
        check_free(self.command.host, self.command.port)
        inherited = {name: value for name, value in os.environ.items() if not _from_launcher(name)}
        with self.log.open(self.command.command) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ebft.serving.supervisor", "--", *self.command.command],
                env={**inherited, **self._environment, **self.command.environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _answers(self, process: subprocess.Popen) -> bool:
        if process.poll() is not None:
            return False  # a response from that address would be from another server
        connection = http.client.HTTPConnection(
            reachable_host(self.command.host), self.command.port, timeout=ANSWER_TIMEOUT
        )
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _ended(self, process: subprocess.Popen, when: str = "unexpectedly") -> str:
        return f"vLLM exited {when} (exit code {process.poll()}). {self.log.tail()}"

    def _watch(self, on_restart: Callable[[], None] | None, timeout: float) -> None:
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        while not self._stopping.wait(PAUSE):
            process = self._process
            if process is None or process.poll() is None:
                continue
            try:
                self._restart(process, restarts)
                if self._ready_again(timeout) and on_restart is not None:
                    on_restart()
            except Exception as error:  # an exception on this thread would go unnoticed while callers wait
                self._give_up(str(error) if isinstance(error, EBFTError) else f"{type(error).__name__}: {error}")
                return

    def _restart(self, dead: subprocess.Popen, restarts: deque[float]) -> None:
        now = time.monotonic()
        if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW:
            minutes = f"{RESTART_WINDOW / 60:g} minutes"
            raise ServerError(f"vLLM was restarted {MAX_RESTARTS} times within {minutes}. {self._ended(dead)}")
        restarts.append(now)
        with self._lock:
            if self._stopping.is_set():
                return
            say(
                f"vLLM exited unexpectedly (exit code {dead.poll()}) and is restarted. See its log {self.log.path}",
                err=True,
            )
            self._launch()

    def _ready_again(self, timeout: float) -> bool:
        """Whether the new process became ready; False if it exited, which the caller's loop detects, or was stopped."""
        deadline = time.monotonic() + timeout
        while not self._stopping.wait(PAUSE):
            process = self._process
            if process is None or process.poll() is not None:
                return False
            if self._answers(process):
                self._ready = process
                return True
            if time.monotonic() > deadline:
                raise ServerError(f"vLLM was restarted but not ready within {timeout:g} seconds. {self.log.tail()}")
        return False

    def _give_up(self, failure: str) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            self.failure = failure
            end_supervisor(self._process)
        say(f"vLLM is not restarted: {failure}", err=True)


def end_supervisor(supervisor: subprocess.Popen) -> None:
    """Make the supervisor stop its server, and wait for it."""
    supervisor.stdin.close()
    supervisor.terminate()  # forks of this process, such as data loader workers, may keep its standard input open
    try:
        supervisor.wait(GRACE + LAST_WAIT + 1)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _from_launcher(name: str) -> bool:
    return name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES)
