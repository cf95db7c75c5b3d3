"""The verifiers: hand-made functions, and completions that try to pass without doing the work."""

import time

import pytest
import rewards
import sandbox
import verifiers

PROMPT = '''def double(x):
    """Return twice x.

    >>> double(2)
    4
    >>> double("a")
    'aa'
    """'''
ROW = {"output": "\n    return x + x\n", "has_doctest": True, "module": ""}


def passes(completion: str, prompt: str = PROMPT) -> float | None:
    return verifiers.passes_doctest(prompt, [completion], ROW)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("\n    return x + x\n", 1.0),
        ("\n    return x +\n", 0.0),
        ("", 0.0),  # a docstring alone is valid Python, and no work
        ("\n    # nothing\n", 0.0),
        ("\n    return x\n\n\ndef other(:\n", 1.0),  # what follows the function does not count
        ("\n    return x\nprint(", 1.0),
        ("\n    if x:\n", 0.0),
        ("\n  return x\n", 0.0),
        ("\n    return '''\n    never closed", 0.0),
        ("\n\treturn x\n", 0.0),  # tabs behind spaces
        ("\n    return " + "(" * 500, 0.0),
        ("\n    return '\x00'\n", 0.0),
        ("; x\n", 1.0),
        (".strip()\n    return x\n", 0.0),  # the docstring is none any more
        ("(x)\n    return x\n", 0.0),
    ],
)
def test_parses(completion, score):
    assert verifiers.parses(PROMPT, [completion], {}) == score


def test_doctests_decide():
    for body, score in (("return x + x", 1.0), ("return 2 * x", 1.0), ("return x * x", 0.0), ("return None", 0.0)):
        assert passes(f"\n    {body}\n") == score, body
    assert passes("(x)\n    return x + x\n") == 0.0, "a docstring that becomes code has no examples"
    assert verifiers.passes_doctest(PROMPT, ["\n    return x + x\n"], {**ROW, "has_doctest": False}) is None
    prompt = '''def first(x):
    """First.

    >>> first([1, 2, 3])  # doctest: +ELLIPSIS
    [1...]
    >>> first([])
    Traceback (most recent call last):
    IndexError: list index out of range
    """'''
    assert passes("\n    return [x[0], 2]\n", prompt) == 1.0
    assert passes("\n    return [x[0] if x else 1, 2]\n", prompt) == 0.0
    skipped = 'def f():\n    """F.\n\n    >>> f()  # doctest: +SKIP\n    1\n    """'
    assert not verifiers.examples_pass(skipped, "\n    return 1\n"), "only skipped examples decide nothing"
    example = ">>> f()  # doctest: +IGNORE_EXCEPTION_DETAIL\n    Traceback (most recent call last):\n    some.Err: why"
    prompt = f'def f():\n    """Fail.\n\n    {example}\n    """'
    body = "\n    class Err(Exception): ...\n    raise Err('for another reason')\n"
    assert verifiers.examples_pass(prompt, body)
    assert not verifiers.examples_pass(prompt, body.replace("raise Err", "raise ValueError"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "return 'x' * 10**10",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "print(4)",  # the value of the call is None, and what is printed more is wrong for the second example
        "print('4'); print(\"'aa'\")",
        'import sys; sys.__stdout__.write(\'{"key": 0, "examples": []}\'); sys.__stdout__.flush()',
        "import os; [os.write(n, b'4') for n in range(1, 9)]; return x + x + x",
        "import os; pid = os.fork(); return x + x",
        "import subprocess; subprocess.run(['sleep', '60']); return x + x",
        "import socket; socket.create_connection(('127.0.0.1', 9)); return x + x",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM); return x + x",
        "return double(x)",
        "double.__doc__ = ''; return None",
    ],
)
def test_no_way_around_the_examples(body):
    started = time.monotonic()
    assert passes(f"\n    {body}\n") == 0.0
    assert time.monotonic() - started < sandbox.CPU_SECONDS * sandbox.WALL_SECONDS + 4


def test_files_can_be_neither_written_nor_removed(tmp_path):
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("here")
    for body in (
        f"open({str(new)!r}, 'w').write('x' * 100)",
        f"open({str(kept)!r}, 'a').write('more')",
        f"import os; os.remove({str(kept)!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import pathlib; pathlib.Path({str(kept)!r}).rename({str(new)!r})",
    ):
        assert passes(f"\n    {body}\n    return x + x\n") == 0.0, body
    assert kept.read_text() == "here" and not new.exists()


def test_the_code_sees_an_empty_folder_and_the_names_of_its_module():
    found = sandbox.run_examples("import os", ["os.listdir('.')", "median([3, 1, 2])", "1 / 0"], "statistics")
    assert [entry["printed"] for entry in found] == ["[]\n", "2\n", ""]
    assert found[2]["raised"] == "ZeroDivisionError: division by zero\n"


def test_the_reward_scores_each_completion_with_its_own_prompt_and_reference():
    completions = ["\n    return len(x)\n", "\n    return (\n", "\n    return x\n"]
    references = ["\n    return len(x)\n", "\n    return len(x)\n", "\n    return x\n"]
    assert rewards.substance(completions, [PROMPT] * 3, references, other=[1, 2, 3]) == [1.0, 0.0, 0.0]


def test_a_trivial_body_gets_no_reward():
    for body, score in (
        ("return sorted(x.items())", 1.0),
        ("return sorted(x)", 2 / 3),  # one of two names
        ("return sorted(x.items(), key=len(print(x)))", 2 * 2 / 6),  # names that the reference has not
        ("pass", 0.0),
        ("...", 0.0),
        ("return None", 0.0),
        ("return x", 0.0),
        ("raise NotImplementedError(sorted(x.items()))", 0.0),
        ("return sorted(x.items()", 0.0),
    ):
        of = lambda reference, body=body: verifiers.substance(PROMPT, [f"\n    {body}\n"], {"output": reference})
        assert of("\n    return sorted(x.items())\n") == pytest.approx(score) and of("\n    return x\n") is None, body


@pytest.mark.parametrize("answer", ["os.write(3, b'\\xff')", "os.write(3, b'[' * 50000); os._exit(0)"])
def test_answers_that_cannot_be_read_are_no_pass(answer):
    prompt = 'def f():\n    """Return one.\n\n    >>> f()\n    1\n    """'
    assert passes(f"\n    import os\n    {answer}\n    return 1\n", prompt) == 0.0
