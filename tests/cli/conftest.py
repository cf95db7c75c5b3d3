"""The command line in this process, and what of an evaluation its tests need."""

import os
import re

import pytest
from typer.testing import CliRunner

from ebft.tools.cli import app
from tests.evaluation.conftest import models, rows, write_config

__all__ = ["ENVIRONMENT", "ebft", "models", "plain", "refused", "rows", "write_config"]

TERMINAL = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
ENVIRONMENT = {**os.environ, **TERMINAL}


def plain(text):
    """`text` without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def flat(text):
    return " ".join(plain(text).split())


@pytest.fixture
def ebft():
    """`ebft("config", "--check", path)`: the command line in this process."""

    def run(*arguments):
        width = {"COLUMNS": os.environ["COLUMNS"]} if "COLUMNS" in os.environ else {}  # a test may set another one
        return CliRunner(env=TERMINAL | width).invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def refused(ebft):
    """`refused("train", path)`: what a command says that ends with exit code 2, in one line."""

    def run(*arguments):
        result = ebft(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output, (arguments, result.output)
        return flat(result.stderr)

    return run
