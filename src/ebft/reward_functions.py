"""Calls of user-defined reward functions, with errors that name the function, its line and what it returned.

Worker processes that call them are replaced if they crash or exceed the time limit. Each imports this module and what
its functions need. Nothing here imports PyTorch, which would take every process seconds and half a gigabyte.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial, update_wrapper
from itertools import islice
from multiprocessing.context import SpawnContext, SpawnProcess
from queue import SimpleQueue
from typing import Any

from ebft.config.user_functions import user_code
from ebft.errors import ConfigError, RewardError, doing, warn

_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which rewards are summed
_ATOMS = (int, float, str, bool)


def checked_reward(function: Any) -> Any:
    """The reward function such that errors and invalid rewards raise RewardError.

    Models are returned unchanged, and so are rewards of this package, which trainers recognise by their class.
    """
    from torch import nn  # not imported in worker processes

    is_ours = any(of.__module__.partition(".")[0] == "ebft" for of in type(function).__mro__)
    if not callable(function) or isinstance(function, nn.Module) or is_ours:
        return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def call(**given: Any) -> list[float | None]:
            prompts = list(given["prompts"])
            with user_code("", RewardError, _failure(function, given)):
                return rewards_of(function, await function(**_own(given)), prompts)

    else:

        def call(**given: Any) -> list[float | None]:
            return call_function(function, _own(given))

    update_wrapper(call, function)
    if not hasattr(function, "__name__"):  # the name for logs, which callable objects may lack
        call.__name__ = getattr(getattr(function, "func", None), "__name__", type(function).__name__)
    return call


def call_function(function: Callable, given: dict[str, Any]) -> list[float | None]:
    """Call the function and return its rewards. Raises RewardError if it fails or they cannot be used."""
    prompts = list(given["prompts"])
    with user_code("", RewardError, _failure(function, given), passes=RewardError):
        return rewards_of(function, function(**given), prompts)


def _failure(function: Callable, given: dict[str, Any]) -> Callable[[str], str]:
    words = f"The reward function {name_of(function)} failed: "
    more = f" It is called with {', '.join(given)}; type: passthrough adds all columns (completions of text are text)."
    is_call = lambda happened: "argument" in happened and ", line " not in happened  # not within the function
    return lambda happened: f"{words}{happened}.{more if is_call(happened) else ''}"


def _own(value: Any) -> Any:
    """A copy of nested lists and dicts, such as messages, for a function that may change what it is given."""
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    if type(value) is not list:
        return value
    if value and type(value[0]) in _ATOMS and type(value[-1]) in _ATOMS:
        return value.copy()
    return [_own(each) for each in value]


def rewards_of(function: Callable, found: Any, prompts: list) -> list[float | None]:
    """The rewards that a function returned, one per completion. Raises RewardError if they cannot be used.

    A reward is a finite number, or None if the function does not apply; NaN is neither.
    """
    name = f"The reward function {name_of(function)}"
    if isinstance(found, bytes | Mapping | Set):
        raise RewardError(f"{name} returned a {type(found).__name__}; it must return a list in the completions' order.")
    rewards = list(islice(found, len(prompts) + 1))  # a generator may have no end
    if len(rewards) != len(prompts):
        count = f"more than {len(prompts)}" if len(rewards) > len(prompts) else len(rewards)
        raise RewardError(
            f"{name} returned {count} rewards for {len(prompts)} completions, not one (or None) for each."
        )
    for index, value in enumerate(rewards):
        if value is not None and (isinstance(value, str) or not abs(value) <= _LARGEST):
            raise RewardError(
                f"{name} returned {value!r:.80} for completion {index} (prompt {prompts[index]!r:.80}). Rewards must "
                "be finite numbers, or None for no reward."
            )
    return [None if value is None else float(value) for value in rewards]


def name_of(function: Callable) -> str:
    module = getattr(function, "__module__", None)  # functions of other libraries may have none
    name = getattr(function, "__qualname__", repr(function))
    return f"{module}.{name}" if module else name


def in_chunks(function: Any, groups: int, group_size: Callable[[], int]) -> Any:
    """Return a plain reward function such that it is called with at most `groups` prompt groups at a time."""
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return function

    def call(**given: Any) -> list[float | None]:
        rewards: list[float | None] = []
        logged: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for columns, others in chunks(given, groups * group_size()):
            size = len(columns["prompts"])
            if "log_metric" in others:
                note = lambda name, value, size=size: logged[name].append((value, size))
                others = others | {"log_metric": note}
            rewards += rewards_of(function, function(**columns, **others), columns["prompts"])
        for name, values in logged.items():  # one value per batch, as without chunks
            given["log_metric"](name, sum(v * size for v, size in values) / sum(size for _, size in values))
        return rewards

    return update_wrapper(call, function)


def chunks(given: dict[str, Any], size: int) -> Iterator[tuple[dict[str, list], dict[str, Any]]]:
    """Yield the lists of all completions among the arguments, `size` completions at a time; and the other arguments."""
    count = len(given["prompts"])
    is_column = lambda value: isinstance(value, list | tuple) and len(value) == count
    columns = {name: list(value) for name, value in given.items() if is_column(value)}
    others = {name: value for name, value in given.items() if name not in columns}
    for start in range(0, count, size):
        yield {name: value[start : start + size] for name, value in columns.items()}, others


NAME = "ebft reward function"  # of the processes
_DEATHS = 8  # after which a function whose process always ends is an error
_GUARD = 'If training is started by a script, guard its code with `if __name__ == "__main__":`.'
Rewards = list[float | None]
RewardFunction = Callable[..., Rewards]


class _Worker(SpawnContext):
    """A process that calls functions in its main thread; it is replaced when it has ended, and its programs with it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._process: SpawnProcess | None = None
        self.has_called = False  # whether it could import a function

    def Process(self, **options: Any) -> SpawnProcess:
        """Return the process of the pool, which calls this."""
        self._process = SpawnProcess(name=NAME, **options)
        return self._process

    def call(self, timeout: float | None, function: RewardFunction, columns: dict[str, list]) -> Rewards:
        """Return the rewards. Raises TimeoutError after `timeout` seconds, without imports; and BrokenProcessPool."""
        if self._process is None or not self._process.is_alive():
            self.stop()
            self._pool = ProcessPoolExecutor(1, self, initializer=_begin)
        self._pool.submit(name_of, function).result()
        self.has_called = True
        return self._pool.submit(call_function, function, columns).result(timeout)

    def stop(self) -> int | None:
        """Kill the process and the programs that it started, and return its exit code."""
        process, pool = self._process, self._pool
        self._process = self._pool = None
        if process is not None and process.pid is not None:
            process.kill()
            with suppress(ProcessLookupError, PermissionError):  # no group yet, or on macOS, all of it have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if pool is not None:
            pool.shutdown()  # whose thread has waited for the process too, and may be the one that has the exit code
        return None if process is None else process.exitcode


def _begin() -> None:
    """Begin the life of a process, which ends with the one that started it."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)

    # A separate group, so that programs that it starts can be ended with it. Ctrl-C in a terminal is not sent to it,
    # but schedulers send SIGINT to all processes of a job. The programs do not inherit a handler.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=end_with_parent, daemon=True).start()


class RewardWorkers:
    """A pool of `count` processes that call reward functions, one prompt group of `group_size()` completions at a time.

    Each process calls the function in its main thread, where `signal.alarm` can be used. A call that takes longer than
    `timeout` seconds ends its process, and so does a crash; the process is replaced. A group whose call timed out, or
    crashed twice, has no reward (None), with a warning. Exceptions of a function raise RewardError, which says where.
    """

    def __init__(self, count: int, timeout: float | None, group_size: Callable[[], int]) -> None:
        self._timeout, self._group_size = timeout, group_size
        self._workers = [_Worker() for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="ebft-rewards")
        self._warned: set[str] = set()
        self._deaths: Counter[str] = Counter()  # by function, since its last result

    def close(self) -> None:
        """Stop the processes and what they call."""
        for worker in self._workers:
            worker.stop()

    def parallel(self, function: Any) -> Any:
        """Return a reward function that calls `function` in the processes.

        Models, names of models, callable objects and coroutine functions are returned unchanged.
        """
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            return function
        with doing(f"sending {name_of(function)} to a process that imports it (reward_num_workers)"):
            pickle.dumps(function)

        def call(**given: Any) -> Rewards:
            # Arguments that are not lists of all completions are not passed on.
            groups, interrupted = [columns for columns, _ in chunks(given, self._group_size())], threading.Event()
            try:
                found = list(self._threads.map(partial(self._try_twice, function, interrupted), groups))
            except BaseException:
                interrupted.set()
                self.close()  # what still runs has no taker
                raise
            sizes = [len(group["prompts"]) for group in groups]
            given_up = lambda why, size: self._without(function, why, size) if isinstance(why, str) else why
            return [reward for rewards in map(given_up, found, sizes) for reward in rewards]

        return update_wrapper(call, function)

    def _try_twice(self, function: RewardFunction, interrupted: threading.Event, group: dict) -> Rewards | str:
        """Return the rewards of a group, or why there are none."""
        worker, reason = self._idle.get(), ""
        try:
            for _ in range(2):
                try:
                    found = worker.call(self._timeout, function, group)
                    self._deaths[function.__qualname__] = 0
                    return found
                except TimeoutError:
                    worker.stop()
                    return f"took longer than {self._timeout:g} s (reward_timeout)"
                except BrokenProcessPool:
                    reason = f"ended its process twice (exit code {worker.stop()})"
                    self._deaths[function.__qualname__] += 1
                    if interrupted.is_set():
                        break
        finally:
            self._idle.put(worker)
        return reason

    def _without(self, function: RewardFunction, reason: str, size: int) -> Rewards:
        name = function.__qualname__
        if not any(worker.has_called for worker in self._workers):
            raise ConfigError(
                f"reward_num_workers: {name} {reason} before a call, since each process has to import it from "
                f"{function.__module__}; they have printed why. {_GUARD} A function of a notebook, or of code without "
                "a file, must be moved to a module."
            )
        if self._deaths[name] >= _DEATHS:
            raise RewardError(f"The reward function {name} {reason}, as in each of its last calls: no reward is left.")
        if name not in self._warned:
            self._warned.add(name)
            warn(f"{name} {reason} for the completions of a prompt, which get no reward from it (said once).")
        return [None] * size


def run_in_workers(funcs: list, count: int, timeout: float | None, group_size: Callable[[], int]) -> list:
    """Return the reward functions such that plain functions run in `count` processes, or unchanged if `count` is 1."""
    if multiprocessing.current_process().name == NAME:
        sys.exit(f"A process for reward functions has imported the script, which starts training again. {_GUARD}")
    if count == 1 or not any(inspect.isfunction(function) for function in funcs):
        return funcs
    workers = RewardWorkers(count, timeout, group_size)
    return [workers.parallel(function) for function in funcs]
