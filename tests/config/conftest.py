"""The smallest config, as values and as a file."""

import warnings

import pytest

MINIMAL = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "completion"}]}
ENTRY = {"path": "some/data"}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}


def strided(**options):
    """Keys of strided mode with these options."""
    return {"rl": "ebft", "ebft": {"mode": "strided", **options}}


def dataset(**keys):
    """A section `datasets` with one entry, of chats unless `type` is given."""
    return {"datasets": [{"path": "x", "type": "chat_template", **keys}]}


def warned(make, *args, **keys):
    """A config, or what another call returns, and its warnings."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        return make(*args, **keys), [str(warning.message) for warning in caught]


@pytest.fixture
def make():
    """`make(**keys)`: a RunConfig with those keys beside the required ones."""
    from ebft.run.config.schema import RunConfig

    return lambda **keys: RunConfig.from_dict({**MINIMAL, **keys})


@pytest.fixture
def write(tmp_path):
    """`write(text)`: a config file with the required keys followed by `text`."""

    def write_file(text="", required=True):
        path = tmp_path / "run.yaml"
        start = "base_model: some/model\ndatasets:\n  - path: some/data\n    type: completion\n" if required else ""
        path.write_text(start + text, encoding="utf-8")
        return path

    return write_file
