"""Keys of Liger's kernels reach transformers where they run, and are refused or named where they do not."""

import sys
from types import SimpleNamespace

import pytest

from ebft.errors import ModelError
from ebft.methods.sft import check_kernels
from ebft.run.checks import check_machine
from ebft.run.trainer import training_kwargs
from tests.config.test_messages import CPU, GPU
from tests.config.test_messages import config as config_with

ASKED = {"liger_rms_norm": True, "liger_glu_activation": True}


def test_only_the_kernels_that_are_asked_for_reach_transformers():
    config = config_with(**ASKED)
    kwargs = training_kwargs(config, GPU, rows=4, has_eval=False)
    assert kwargs["use_liger_kernel"] is True
    names = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")
    assert kwargs["liger_kernel_config"] == {name: name in ("rms_norm", "swiglu", "geglu") for name in names}
    assert "use_liger_kernel" not in training_kwargs(config_with(), GPU, rows=4, has_eval=False)
    assert "use_liger_kernel" not in training_kwargs(config, CPU, rows=4, has_eval=False)
    with pytest.warns(UserWarning, match="liger_rms_norm, liger_glu_activation: no effect on CPU"):
        check_machine(config, CPU)
    with pytest.warns(UserWarning, match="liger_rope has no effect: .* does not read it"):
        config_with(rl="ebft", ebft={"mode": "strided"}, liger_rope=True)


def test_a_kernel_that_liger_does_not_have_for_a_model_is_an_error(monkeypatch):
    kernels = {"llama": lambda rope=True, rms_norm=True, swiglu=True, model=None: None}
    known = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN=kernels)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", known)
    check_kernels("llama", ["liger_rope", "liger_glu_activation"])
    with pytest.raises(ModelError, match="liger_layer_norm: Liger has no such kernel for llama models"):
        check_kernels("llama", ["liger_rope", "liger_layer_norm"])
    with pytest.raises(ModelError, match="liger_rope: Liger has no such kernel for opt models"):
        check_kernels("opt", ["liger_rope"])
