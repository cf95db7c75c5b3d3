"""How a command is run and what it says, and what of an evaluation its tests need."""

import os
import re

from tests.evaluation.conftest import models, rows, write_config

__all__ = ["models", "rows", "write_config"]

TERMINAL = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
ENVIRONMENT = {**os.environ, **TERMINAL}


def plain(text):
    """`text` without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def flat(text):
    return " ".join(plain(text).split())
