"""The public names, imported when first used."""

import subprocess
import sys

import pytest

import ebft


@pytest.mark.parametrize("name", ebft.__all__)
def test_a_public_name_is_there(name):
    assert callable(getattr(ebft, name)) and name in dir(ebft)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'tain'; it has load_config"):
        ebft.tain  # noqa: B018


def test_importing_the_package_is_cheap():
    code = "import sys, ebft; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
