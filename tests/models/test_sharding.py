"""Settings of FSDP that are refused or changed; sharded models are tested in tests/structured and tests/strided."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ebft.errors import ConfigError
from ebft.models.causal_lm import without_hooks
from ebft.models.sharding import check_version, keep_output_dtype


def accelerator(**changes):
    settings = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "mixed_precision_policy": None, **changes}
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**settings)))


def test_settings_that_are_refused_or_supported():
    for changes, message in (
        ({"fsdp_version": 1}, "FSDP1 is not supported: .* Remove version from fsdp_config"),
        ({"cpu_ram_efficient_loading": True}, "a vLLM server is incompatible with cpu_ram_efficient_load"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_version(accelerator(**changes), "cpu" in str(changes))
    check_version(SimpleNamespace(state=SimpleNamespace()), True)  # no FSDP
    check_version(accelerator(), True)
    check_version(accelerator(cpu_ram_efficient_loading=True))


def test_log_probabilities_are_not_rounded():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    changed = accelerator(mixed_precision_policy=policy)
    keep_output_dtype(changed)
    found = changed.state.fsdp_plugin.mixed_precision_policy
    assert found.output_dtype is None
    assert (found.param_dtype, found.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_a_module_without_its_hooks():
    linear = torch.nn.Linear(3, 2)
    linear.register_forward_hook(lambda *_: torch.zeros(()))
    found, x = without_hooks(linear), torch.randn(4, 3)
    torch.testing.assert_close(found(x), x @ linear.weight.T + linear.bias)
    assert found.weight is linear.weight and without_hooks(linear) is found
    assert not linear(x).any() and [name for name, _ in linear.named_modules()] == [""]
