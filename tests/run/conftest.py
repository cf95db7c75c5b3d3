"""Runs that tests of crashes and of interruptions compare with."""

import ctypes
import os
import struct
from contextlib import nullcontext

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


class _WithoutPrivileges:
    """Context manager in which permissions apply to this process also if it is root's."""

    def _set(self, change):
        header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, data) == 0
        words = list(struct.unpack("6I", data.raw))
        words[0] = change(words[0])
        assert libc.capset(header, struct.pack("6I", *words)) == 0

    def __enter__(self):
        self._set(lambda effective: effective & ~0b110)  # DAC_OVERRIDE, DAC_READ_SEARCH

    def __exit__(self, *_):
        self._set(lambda effective: effective | 0b110)


@pytest.fixture
def as_user():
    return _WithoutPrivileges() if os.geteuid() == 0 else nullcontext()
