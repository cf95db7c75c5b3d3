"""Reward functions of the tests. Each process that calls them imports this module, so it is small."""

import os
import signal
import subprocess
import sys
import time


def imported(prompts, **columns):
    """1 in a process that has imported PyTorch."""
    return [float("torch" in sys.modules)] * len(prompts)


def with_alarm(completions, answer, **columns):
    """Only possible in the main thread of a process."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return [float(len(text) + number) for text, number in zip(completions, answer)]


def process_ids(prompts, **columns):
    time.sleep(0.2)
    return [float(os.getpid())] * len(prompts)


def group_means(completions, **columns):
    return [sum(map(len, completions)) / len(completions)] * len(completions)


def slow_for_some(prompts, **columns):
    if prompts[0] == "slow":
        time.sleep(60)
    return [1.0] * len(prompts)


def crashes_for_some(prompts, **columns):
    if prompts[0] == "crash":
        os._exit(7)
    return [2.0] * len(prompts)


def crashes_once(prompts, flag, **columns):
    try:
        os.mkdir(flag[0])
    except FileExistsError:
        return [3.0] * len(prompts)
    os._exit(1)


def one_too_few(prompts, **columns):
    return [1.0] * (len(prompts) - 1)


def lengths(completions, answer, **columns):
    return [float(len(text[0]["content"]) + number) for text, number in zip(completions, answer)]


def generates(prompts, **columns):
    yield from [1] * len(prompts)


def sleeps(prompts):
    time.sleep(prompts[0])
    return prompts


def waits(prompts):
    """Does not return; the first prompt is a path that gets the id of the process."""
    with open(prompts[0], "w") as file:
        file.write(str(os.getpid()))
    while True:
        pass


class Odd(Exception):
    """Cannot be unpickled: it has more arguments than it passes on."""

    def __init__(self, first, second):
        super().__init__(first)


def raises(prompts, kind, **columns):
    errors = {"timeout": TimeoutError("the sandbox did not answer"), "odd": Odd("no answer", 3)}
    raise errors[kind[0]]


def runs_a_program(prompts, code):
    """Waits for a program that does not end; the first prompt is a path that gets its id."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(prompts[0], "w") as file:
        file.write(str(program.pid))
    if code[0] is not None:
        os._exit(code[0])
    program.wait()


def always_ends(prompts, **_):
    os._exit(0)
