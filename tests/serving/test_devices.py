"""Which GPUs the server gets beside the trainer."""

import re

import pytest

from ebft.errors import ConfigError
from ebft.serving.command import device_environment

NAMED = "CUDA_VISIBLE_DEVICES"
TOO_FEW = re.compile("(?=.*vllm_mode: colocate)(?=.*use_vllm: false)(?=.*fewer processes)(?=.*more GPUs visible)", re.S)


@pytest.mark.parametrize(
    ("vllm", "processes", "gpus", "visible", "expected"),
    [
        ({}, 1, 2, None, "1"),  # the last
        ({}, 1, 4, None, "3"),
        ({"tensor_parallel_size": 2}, 2, 4, None, "2,3"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 1, 8, None, "4,5,6,7"),
        ({}, 1, 2, "5, 3", "3"),
        ({}, 1, 3, "GPU-a,GPU-b,GPU-c", "GPU-c"),
        ({}, 1, 2, "0,1,-1,2", "1"),  # CUDA stops at the first that is none
        ({}, 1, 0, None, None),  # nothing to divide
        ({"device": "cpu"}, 1, 2, None, None),
        ({"env": {NAMED: "0"}}, 1, 1, None, None),
        ({}, 1, 1, None, ConfigError),
        ({}, 4, 4, None, ConfigError),
        ({"data_parallel_size": 3}, 2, 4, None, ConfigError),
    ],
)
def test_the_server_gets_the_last(make_config, vllm, processes, gpus, visible, expected):
    given = make_config(vllm=vllm).vllm, processes, gpus, {NAMED: visible} if visible else {}
    if expected is ConfigError:
        with pytest.raises(ConfigError, match=TOO_FEW):
            device_environment(*given)
    else:
        assert device_environment(*given) == ({NAMED: expected} if expected else {})
