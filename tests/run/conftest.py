"""Runs that tests of crashes and of interruptions compare with."""

import pytest

from tests.run.crash import config_of, result, run, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def unbroken(inputs, tmp_path_factory):
    """`unbroken(method)`: the result of a run that nothing stops; each is made once."""
    made = {}

    def of(method, **changes):
        key = method, *map(str, changes.items())
        if key not in made:
            out = tmp_path_factory.mktemp(method) / "out"
            ended = run(config_of(method, inputs, out, **changes))
            assert ended.code == 0, ended.output
            made[key] = result(out)
        return made[key]

    return of
