"""Calls of user-defined functions: their errors, what they leave behind in the process, and how long they take."""

from __future__ import annotations

import dis
import linecache
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NoReturn

from ebft.errors import EBFTError, cause, shortened
from ebft.processes import is_main_process, rank

_LONGEST_LINE = 120
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
)
_DIRECTORY, _SEED, _RANDOM = "the working directory", "torch.manual_seed", "random numbers"
_HANDLERS = ("signal.signal(SIGINT)", "signal.signal(SIGTERM)")
_STREAMS = ("sys.stdout", "sys.stderr")
_MARK = 0x35 << 24  # changes a seed during a call, which stays below 2**32
_SETTINGS = (*_STREAMS, *_HANDLERS, "torch.set_num_threads", _SEED, "torch.set_float32_matmul_precision",
             "torch.set_deterministic_debug_mode")  # fmt: skip
# What the state was if user code is the first that imports PyTorch.
_FRESH = {"torch.inference_mode": False, "torch.set_grad_enabled": True, "torch.autocast": False,
          "torch.set_default_device": "cpu", "torch.set_default_dtype": "torch.float32"}  # fmt: skip
_warned: set[tuple[str, ...]] = set()
_running: list[str] = []  # the calls that have not returned, the last one at the end
_marked: int | None = None  # the seed that the generator stores during a call
_entered: list[Any] = []  # modes of PyTorch, which end when they are collected


@contextmanager
def user_code(what: str, error: type[EBFTError], sets_up: bool = False) -> Iterator[None]:
    """Context manager for a call of user code, which `what` names: `named_call` and `state_kept`."""
    with named_call(what, error), state_kept(what, sets_up):
        yield


@contextmanager
def named_call(
    what: str,
    error: type[EBFTError],
    says: Callable[[str], str] | None = None,
    passes: type[Exception] = EBFTError,
) -> Iterator[None]:
    """Raise what user code, which `what` names, raises as `error`, and report a call that takes minutes.

    Exceptions that `passes` includes and interruptions by a signal stay the same. Everything else is converted, also
    sys.exit() and a KeyboardInterrupt that is not Ctrl-C. `says` returns the message, given what happened.
    """
    handled = sys.exception()  # of a caller: the context of whatever is raised in the call
    _running.append(what)
    try:
        with watched(what):
            yield
    except BaseException as raised:
        interruption = _interruption(raised, handled)
        if interruption is not None and interruption is not raised:  # user code converted it
            raise interruption from None
        if interruption is not None or isinstance(raised, passes):
            raise
        happened = what_happened(raised)
        raise error(f"{what} failed: {happened}." if says is None else says(happened)) from raised
    finally:
        with suppress(ValueError):  # in a process that a call forked
            _running.remove(what)


def name_exits() -> None:
    """Name the user code that ends this process with os._exit() or os.kill(), which no `except` sees.

    os._exit() is replaced, since Python reports no event for it; a status of 0 becomes 1, as the command is not done.
    """
    own, leave = os.getpid(), os._exit

    def exit_named(status: int) -> NoReturn:
        if os.getpid() == own and _running:  # not in forked processes, which have to end like this
            _say(f"called os._exit({status})")
            status = status or 1
        leave(status)

    def hear(event: str, arguments: tuple) -> None:
        if event == "os.kill" and arguments[0] == own == os.getpid() and _running and arguments[1]:
            _say(f"sends signal {arguments[1]} to this process with os.kill()")

    os._exit = exit_named
    sys.addaudithook(hear)


def _say(does: str) -> None:
    with suppress(Exception):  # stderr is closed
        sys.stderr.write(f"\nError: {_running[-1]} {does}.\n")
        sys.stderr.flush()


def _interruption(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The interruption among an error and its causes, up to an exception that was `handled` before the call."""
    chain, seen = [error], {id(handled), id(error)}
    for each in chain:
        for before in (each.__cause__, each.__context__):
            if before is not None and id(before) not in seen:
                seen.add(id(before))
                chain.append(before)
    return next((each for each in chain if _is_interruption(each)), None)


def _is_interruption(error: BaseException | None) -> bool:
    """Whether a signal, or the cancellation of a task, ended a call: user code did not raise it by itself."""
    asyncio = sys.modules.get("asyncio")  # to import it takes 50 ms
    if asyncio is not None and isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # no task is running
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        return False
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not is_outside(trace.tb_frame.f_code.co_filename):  # of a handler of this package or asyncio
        return True
    # Python's handler of SIGINT has no frame: its exception appears at any instruction but a `raise`.
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]


@contextmanager
def state_kept(what: str, sets_up: bool = False) -> Iterator[None]:
    """Restore the state of the process that a run depends on if user code changes it, and warn once.

    `what` names the code. If it `sets_up` something, such as a module that is imported, it may change settings, which
    are kept: handlers of signals, random seeds, and how PyTorch computes.
    """
    before = _state()
    seed = None
    try:
        seed = None if sets_up else _mark_seed(before)
        yield
    finally:
        changes = {}
        for name, value in _state().items():
            expected = before.get(name, _FRESH.get(name, value))
            if name == _SEED and seed is not None and value == seed ^ _MARK:
                _write_seed(seed)
                continue
            if name == _RANDOM or (sets_up and name in _SETTINGS):
                continue
            is_set_again = name == _SEED and seed is not None  # maybe to the same one
            if not is_set_again and (value is expected or (name not in _STREAMS and value == expected)):
                continue
            shown = expected ^ _MARK if name == _SEED and expected == _marked else expected
            _restore(name, expected, before)
            if name != "torch.set_grad_enabled" or "torch.inference_mode" not in changes:  # which includes it
                changes[name] = name if name in (*_HANDLERS, *_STREAMS) else f"{name}: {shown} became {value}"
        if changes and (what, *changes) not in _warned:
            _warned.add((what, *changes))
            warnings.warn(
                f"{what} changed {'; '.join(changes.values())}. This was changed back, because the run depends on it. "
                "This warning is given once.",
                stacklevel=4,
            )


def _state() -> dict[str, Any]:
    state: dict[str, Any] = {_DIRECTORY: None}
    with suppress(FileNotFoundError):  # it was deleted
        state[_DIRECTORY] = os.getcwd()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            state[f"signal.signal({number.name})"] = signal.getsignal(number)
        state |= {name: getattr(sys, name.removeprefix("sys.")) for name in _STREAMS}
    torch = sys.modules.get("torch")  # never imported from here
    if torch is None:
        return state
    return state | {
        "torch.inference_mode": torch.is_inference_mode_enabled(),  # before the gradient mode, which it changes
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.set_default_device": str(torch.get_default_device()),
        "torch.set_default_dtype": str(torch.get_default_dtype()),
        "torch.autocast": torch.is_autocast_enabled("cpu"),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.set_deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        _SEED: _seed(torch),
        _RANDOM: (torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None),
    }


def _seed(torch: ModuleType) -> int:
    seed = torch.initial_seed()
    if seed == _marked and threading.current_thread() is not threading.main_thread():  # of a call there
        return seed ^ _MARK
    return seed


def _mark_seed(before: dict[str, Any]) -> int | None:
    """Change the seed that the generator of the CPU stores, not its numbers; returns the seed before, if it could.

    Seeding with the same seed would not be noticed otherwise. Nested calls use the mark of the outer one.
    """
    global _marked
    if _SEED not in before or threading.current_thread() is not threading.main_thread() or before[_SEED] == _marked:
        return None
    seed = before[_SEED]
    if int.from_bytes(bytes(before[_RANDOM][0][:8].tolist()), sys.byteorder) != seed:  # another layout
        return None
    _write_seed(seed ^ _MARK)
    if sys.modules["torch"].initial_seed() != seed ^ _MARK:
        sys.modules["torch"].set_rng_state(before[_RANDOM][0])
        return None
    _marked = seed ^ _MARK
    return seed


def _write_seed(seed: int) -> None:
    torch = sys.modules["torch"]
    state = torch.get_rng_state()
    for index, byte in enumerate(seed.to_bytes(8, sys.byteorder)):
        state[index] = byte
    torch.set_rng_state(state)


def _restore(name: str, value: Any, before: dict[str, Any]) -> None:
    torch = sys.modules.get("torch")
    if name == _DIRECTORY:
        with suppress(OSError, TypeError):  # it was deleted
            os.chdir(value)
    elif name.startswith("signal."):
        signal.signal(signal.Signals[name[len("signal.signal(") : -1]], value)
    elif name in _STREAMS:
        _entered.append(getattr(sys, name[4:]))  # it may close the file of the earlier one when it is collected
        with suppress(ValueError):  # it was detached
            if not getattr(value, "closed", False):
                setattr(sys, name[4:], value)
    elif name == "torch.inference_mode":
        _entered.append(torch.inference_mode(value))
        _entered[-1].__enter__()
    elif name == "torch.autocast":
        torch.set_autocast_enabled("cpu", value)
    elif name == "torch.set_default_dtype":
        torch.set_default_dtype(getattr(torch, value.removeprefix("torch.")))
    elif name == "torch.set_default_device":
        torch.set_default_device(None if value == "cpu" else value)
        if str(torch.get_default_device()) != value:  # a `with torch.device(...)` that was not left
            torch.device(value).__enter__()
    elif name == _SEED:
        of_cpu, of_gpu = before[_RANDOM]
        torch.set_rng_state(of_cpu)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)
    else:
        getattr(torch, name.removeprefix("torch."))(value)


def what_happened(error: BaseException) -> str:
    """What user code raised, and where, on one line: `KeyError: 'text' (own.py, line 4: return row["text"])`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} {_at(error.filename, error.lineno, error.text or '')}"
    place = place_of(error)
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){place}"
    words = " ".join(cause(error).split())
    return f"{words}{place}" if words.startswith(type(error).__name__) else f"{type(error).__name__}: {words}{place}"


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own files at which an error was raised, in parentheses, if there is one."""
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    # Compiled code and <string> have no file.
    own = [(file, number) for file, number in frames if os.path.isfile(file) and is_outside(file)]
    return f" {_at(*own[-1], linecache.getline(*own[-1]))}" if own else ""


def _at(file: str, number: int | None, line: str) -> str:
    line = shortened(line, _LONGEST_LINE)
    return f"({file}, line {number}{': ' if line else ''}{line})"


def is_outside(file: str) -> bool:
    """Whether a file belongs neither to this package nor to Python and the installed packages."""
    path = os.path.realpath(file)
    return not any(path.startswith(folder + os.sep) for folder in (_OURS, *_LIBRARIES))


FIRST, AGAIN = 60.0, 600.0  # seconds until the first line about a call, and between later ones

_running_calls: set[watched] = set()
_thread: threading.Thread | None = None
_wake = threading.Event()
_asleep_until = 0.0
_starting = threading.Lock()


class watched:  # noqa: N801, since it is used as a function
    """Context manager that prints what has been running since when if the block takes longer than `FIRST` seconds.

    `what` is the subject of the line, such as "The reward function my_rewards.score", or a function that returns it;
    `hint` is a sentence that follows. May be nested, and used in several threads. Costs less than 1 µs: one thread
    watches all calls. It needs the interpreter lock, so there is no line while a call of C code keeps it.
    """

    __slots__ = ("due", "hint", "since", "what")

    def __init__(self, what: str | Callable[[], str], hint: str = "") -> None:
        self.what, self.hint = what, hint
        self.since = self.due = 0.0

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self.due = self.since + FIRST
        _running_calls.add(self)
        if _thread is None:
            _start()
        elif self.due < _asleep_until:  # FIRST was lowered
            _wake.set()

    def __exit__(self, *_: object) -> None:
        _running_calls.discard(self)


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="slow calls", daemon=True)
            _thread.start()


def _watch() -> None:
    global _asleep_until
    while True:
        now = time.monotonic()
        calls = list(_running_calls)
        for call in calls:
            if call.due <= now:
                call.due = now + AGAIN
                _report(call, now - call.since)
        _asleep_until = min([now + FIRST, *(call.due for call in calls)])  # a later call is not due before
        _wake.wait(max(0.0, _asleep_until - time.monotonic()))
        _wake.clear()


def _report(call: watched, seconds: float) -> None:
    start = "" if is_main_process() else f"Rank {rank()}: "
    try:
        what = call.what if isinstance(call.what, str) else call.what()
        took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        line = f"{start}{what} has been running for {took}, since {since}. {call.hint}".rstrip() + "\n"
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + line)  # after an unfinished progress bar
        sys.stderr.flush()
    except Exception:  # stderr is closed, or the interpreter ends
        return


def _after_fork() -> None:
    """In a forked process, the thread and the calls of the other one do not exist."""
    global _thread, _asleep_until, _wake, _starting
    _running_calls.clear()
    _thread, _asleep_until, _wake, _starting = None, 0.0, threading.Event(), threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
