"""Which GPUs the server gets beside the trainer."""

import pytest

from ebft.errors import ConfigError
from ebft.serving.command import device_environment


@pytest.mark.parametrize(
    ("vllm", "processes", "gpus", "environ", "expected"),
    [
        ({}, 1, 2, {}, "1"),
        ({}, 1, 4, {}, "3"),
        ({"tensor_parallel_size": 2}, 2, 4, {}, "2,3"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 1, 8, {}, "4,5,6,7"),
        ({}, 1, 2, {"CUDA_VISIBLE_DEVICES": "5, 3"}, "3"),
        ({}, 1, 3, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, "GPU-c"),
        ({}, 1, 2, {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, "1"),  # CUDA stops at the first that is none
    ],
)
def test_the_server_gets_the_last(make_config, vllm, processes, gpus, environ, expected):
    given = device_environment(make_config(vllm=vllm).vllm, processes, gpus, environ)
    assert given == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    ("vllm", "gpus"), [({}, 0), ({"device": "cpu"}, 2), ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, 1)]
)
def test_nothing_to_divide(make_config, vllm, gpus):
    assert device_environment(make_config(vllm=vllm).vllm, 1, gpus, {}) == {}


@pytest.mark.parametrize(("vllm", "processes", "gpus"), [({}, 1, 1), ({}, 4, 4), ({"data_parallel_size": 3}, 2, 4)])
def test_too_few(make_config, vllm, processes, gpus):
    with pytest.raises(ConfigError) as caught:
        device_environment(make_config(vllm=vllm).vllm, processes, gpus, {})
    for hint in ("vllm_mode: colocate", "use_vllm: false", "fewer processes", "more GPUs visible"):
        assert hint in str(caught.value)
