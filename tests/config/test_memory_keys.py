"""Keys that save memory: where they apply, what contradicts them, and where they are passed on."""

import warnings

import pytest

from ebft.errors import ConfigError
from ebft.run.checks import Machine, check_machine, check_runnable
from ebft.run.trainer import training_kwargs

CPU = Machine(has_accelerator=False, supports_bf16=False)
GPU = Machine(has_accelerator=True, supports_bf16=True, devices=("cpu", "cuda", "cuda:0"))
PREFERENCES = {"datasets": [{"path": "a", "type": "chatml.intel"}], "micro_batch_size": 2}
COMPARISONS = {"datasets": [{"path": "a", "type": "bradley_terry.chat_template"}], "reward_model": True}


@pytest.mark.parametrize(("keys", "message"), [
    ({"chunked_cross_entropy": True, "torch_compile": True},
     "chunked_cross_entropy is incompatible with torch_compile, which would compile it again in every step"),
    ({"activation_offloading": True, "torch_compile": True},
     "activation_offloading is incompatible with torch_compile"),
    ({"activation_offloading": "disk"}, "activation_offloading: disk is not supported: TRL's hooks copy all"),
    ({"activation_offloading": "legacy"}, "activation_offloading: legacy is not supported"),
    ({"fp8": True}, "fp8.* need a GPU from the H100 on, and change results"),
    ({"qat": {"weight_dtype": "int4"}}, "qat.* has no int8 weights, which ebft quantize writes"),
])  # fmt: skip
def test_contradictions_are_refused_when_the_config_is_loaded(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


def test_the_doctor_counts_the_logits_that_a_step_keeps(make, monkeypatch):
    monkeypatch.setattr("ebft.config.checks.processes.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="chunked_cross_entropy is incompatible with ZeRO-3"):
        check_runnable(make(deepspeed="zero3", chunked_cross_entropy=True))
    for keys, keeps in (({}, False), ({"chunked_cross_entropy": False}, True), ({"torch_compile": True}, True),
                        ({"deepspeed": "zero3"}, True), ({"deepspeed": "zero2"}, False)):  # fmt: skip
        assert make(**keys).method.keeps_logits(make(**keys)) is keeps


IN_CHUNKS = "True has no effect: SFT and strided mode compute .* in chunks"
OFFLOADING = "activation_offloading: true has no effect with .*gradient_checkpointing"


@pytest.mark.parametrize(("keys", "message"), [
    *(({key: True}, f"{key}: {IN_CHUNKS}")
      for key in ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "liger_cross_entropy")),
    ({"rl": "dpo", "chunked_cross_entropy": True, **PREFERENCES},
     "chunked_cross_entropy has no effect: rl: dpo does not read it"),
    ({"rl": "ebft", "ebft": {"mode": "strided"}, "activation_offloading": True}, OFFLOADING),
    ({"rl": "orpo", "activation_offloading": True, **PREFERENCES}, OFFLOADING),
])  # fmt: skip
def test_what_has_no_effect(make, keys, message):
    with pytest.warns(UserWarning, match=message):
        assert make(**keys).activation_offloading is False


@pytest.mark.parametrize("method", [{"rl": "dpo", **PREFERENCES}, {"rl": "ipo", **PREFERENCES}, COMPARISONS])
def test_offloading_is_passed_to_the_trainers_of_trl(make, method):
    config = make(**method, activation_offloading=True)
    assert training_kwargs(config, GPU, rows=4, has_eval=False)["activation_offloading"] is True
    assert "activation_offloading" not in training_kwargs(config, CPU, rows=4, has_eval=False)
    assert "activation_offloading" in config.method.arguments_class().__dataclass_fields__
    with pytest.warns(UserWarning, match="activation_offloading: true has no effect on CPU: activations are in main"):
        check_machine(make(activation_offloading=True), CPU)
    with warnings.catch_warnings(action="error"):
        check_machine(make(activation_offloading=True), GPU)
