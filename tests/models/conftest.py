"""A run config over the tiny model."""

import pytest


@pytest.fixture
def make_config(tiny_llama_dir):
    from ebft.config.schema import RunConfig

    def make(**keys):
        values = {
            "base_model": str(tiny_llama_dir),
            "sequence_len": 64,
            "datasets": [{"path": "unused", "type": "completion"}],
            **keys,
        }
        return RunConfig.from_dict(values)

    return make
