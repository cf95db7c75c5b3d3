"""The checker of HumanEval: right solutions pass, others do not, and nothing that a solution does ends the study."""

import time

import corpus
import humaneval
import pytest
import sandbox
import sources
from rows import read_rows

from ebft.errors import FetchError

PROBLEMS = read_rows(corpus.TINY / "problems.jsonl")


def test_canonical_solutions_pass():
    for problem in PROBLEMS:
        assert humaneval.passes(problem, "\n" + problem["canonical_solution"])


@pytest.mark.slow
def test_canonical_solutions_of_humaneval_pass_and_empty_bodies_do_not():
    try:
        problems = sources.humaneval()
    except FetchError as error:
        pytest.skip(f"HumanEval cannot be downloaded: {error}")
    assert len(problems) == 164
    for problem in problems[::8]:
        assert humaneval.passes(problem, "\n" + problem["canonical_solution"]), problem["task_id"]
        assert not humaneval.passes(problem, "\n    pass\n"), problem["task_id"]


@pytest.mark.parametrize(
    "body",
    [
        "\n    return x\n",
        "\n    return x +\n",
        "",
        "\n    raise SystemExit(0)\n",
        "\n    import os\n    os._exit(0)\n",
        "\n    import sys; sys.exit(0)\n",
        "\n    global check\n    check = lambda candidate: None\n    return 0\n",
    ],
)
def test_broken_solutions_fail(body):
    assert not humaneval.passes(PROBLEMS[0], body)


def test_an_endless_loop_ends():
    started = time.monotonic()
    assert not humaneval.passes(PROBLEMS[0], "\n    while True:\n        pass\n")
    assert time.monotonic() - started < humaneval.SECONDS * sandbox.WALL_SECONDS + 5


def test_scores_of_samples():
    right, wrong = "\n    return x + 1\n", "\n    return x\n"
    found = humaneval.score(PROBLEMS[:1], [wrong], [[right, wrong, wrong, right]])
    assert found == {"humaneval_greedy": [0.0], "humaneval_pass@1": [0.5], "humaneval_pass@N": [1.0]}


def test_the_prompt_ends_where_a_body_begins_with_a_newline():
    assert humaneval.prompt_of(PROBLEMS[0]).endswith('"""')
