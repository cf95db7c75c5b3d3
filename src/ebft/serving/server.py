"""One vLLM server as an object: started, waited for, watched, stopped."""

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

from ebft.errors import EBFTError
from ebft.serving.address import check_free, reachable_host
from ebft.serving.command import ServerCommand
from ebft.serving.errors import ServerError
from ebft.serving.log import ServerLog
from ebft.serving.supervisor import GRACE, LAST_WAIT

DEFAULT_TIMEOUT = 600.0  # seconds until a server is ready; loading and compiling a large model takes minutes
MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # restarts within seconds, before watching gives up
PAUSE = 0.2  # seconds between two looks
ANSWER_TIMEOUT = 5.0  # seconds for an answer about health

# What launchers tell each trainer about itself. vLLM would take it for its own place among processes.
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


class VLLMServer:
    """A server process and everything it starts; nothing of it outlives this process.

    The server is out of reach of a Ctrl-C in the terminal: whoever holds this object decides when it ends. `with`
    starts and stops it. All methods may be called from any thread.
    """

    def __init__(self, command: ServerCommand, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment` comes in addition to that of this process; what `command` brings wins over both."""
        self.command = command
        self.log = ServerLog(Path(log))
        self.failure: str | None = None  # why watching gave up; the server then stays down
        self._environment = dict(environment or {})
        self._process: subprocess.Popen | None = None
        self._watcher: threading.Thread | None = None
        self._ready: subprocess.Popen | None = None  # the process that answered
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server, such as http://127.0.0.1:8000."""
        return self.command.url

    @property
    def healthy(self) -> bool:
        """Whether the server has become ready since its last start and still runs."""
        process = self._process
        return process is not None and process is self._ready and process.poll() is None

    def start(self) -> None:
        """Start the process; ConfigError when the port is taken or the log cannot be written."""
        with self._lock:
            if self._process is not None:
                raise RuntimeError("The server was started already.")
            self.failure = None
            self._stopping.clear()
            self._launch()
        atexit.register(self.stop)

    def wait_until_healthy(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Return when the server answers that it is ready, also after a restart that `watch` makes.

        ServerError, with the end of the log, as soon as the process ends and nobody will start it again, or after
        `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            process = self._process
            if self.failure is not None:
                raise ServerError(self.failure)
            if self._stopping.is_set() or process is None:
                raise ServerError("The vLLM server is stopped. Start it before waiting for it.")
            if self._answers(process):
                self._ready = process
                return
            if process.poll() is not None and self._watcher is None:
                raise ServerError(self._ended(process, "before it was ready"))
            if time.monotonic() > deadline:
                raise ServerError(
                    f"vLLM was not ready at {self.url} within {timeout:g} seconds. Set trl.vllm_server_timeout higher "
                    f"if it needs longer. {self.log.tail()}"
                )
            self._stopping.wait(PAUSE)

    def wait(self) -> None:
        """Wait until `stop` is called; ServerError, with the end of the log, when the server ends by itself."""
        while not self._stopping.wait(PAUSE):
            if self.failure is not None:
                raise ServerError(self.failure)
            process = self._process
            if process is not None and process.poll() is not None and self._watcher is None:
                raise ServerError(self._ended(process))

    def watch(self, on_restart: Callable[[], None] | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """From now on start the server again when it dies, with one line on the error stream each time.

        `on_restart` is called, in the watching thread, when the new server is ready: it knows no adapters. After
        three restarts within ten minutes, or when a restart fails, `failure` says why and the server stays down.
        """
        with self._lock:
            if self._watcher is not None:
                raise RuntimeError("The server is watched already.")
            self._watcher = threading.Thread(
                target=self._watch, args=(on_restart, timeout), name="vllm-watcher", daemon=True
            )
            self._watcher.start()

    def stop(self) -> None:
        """End the server and every process it started; does nothing when there is none."""
        if os.getpid() != self._owner:
            return  # a fork of this process that ends must not take the server along
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                _end(self._process)
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
            return False  # whatever answers at that address is not this server
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

    def _ended(self, process: subprocess.Popen, when: str = "by itself") -> str:
        return f"vLLM ended {when}, with exit code {process.poll()}. {self.log.tail()}"

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
            except Exception as error:  # on a thread nobody would hear of it, and everybody would wait
                self._give_up(str(error) if isinstance(error, EBFTError) else f"{type(error).__name__}: {error}")
                return

    def _restart(self, dead: subprocess.Popen, restarts: deque[float]) -> None:
        now = time.monotonic()
        if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW:
            minutes = f"{RESTART_WINDOW / 60:g} minutes"
            raise ServerError(f"vLLM was started again {MAX_RESTARTS} times within {minutes}. {self._ended(dead)}")
        restarts.append(now)
        with self._lock:
            if self._stopping.is_set():
                return
            print(
                f"vLLM ended by itself, with exit code {dead.poll()}, and is started again; its log is {self.log.path}",
                file=sys.stderr,
                flush=True,
            )
            self._launch()

    def _ready_again(self, timeout: float) -> bool:
        """Whether the new process became ready; not when it died too, which the next look sees, or was stopped."""
        deadline = time.monotonic() + timeout
        while not self._stopping.wait(PAUSE):
            process = self._process
            if process is None or process.poll() is not None:
                return False
            if self._answers(process):
                self._ready = process
                return True
            if time.monotonic() > deadline:
                raise ServerError(f"vLLM was started again and not ready within {timeout:g} seconds. {self.log.tail()}")
        return False

    def _give_up(self, failure: str) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            self.failure = failure
            _end(self._process)
        print(f"vLLM stays down: {failure}", file=sys.stderr, flush=True)


def _end(supervisor: subprocess.Popen) -> None:
    """Have the supervisor end its server, and wait for it."""
    supervisor.stdin.close()
    supervisor.terminate()  # forks of this process, such as workers that load data, may hold the other end open
    try:
        supervisor.wait(GRACE + LAST_WAIT + 1)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _from_launcher(name: str) -> bool:
    return name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES)
