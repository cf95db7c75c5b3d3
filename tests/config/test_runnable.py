import re
from importlib import import_module

import pytest

from ebft.errors import ConfigError, MissingPackageError
from ebft.machine import Machine
from ebft.methods.base_config import check_deepspeed
from ebft.run.checks import check_machine, check_runnable, launched_processes
from tests.config.conftest import warned


@pytest.mark.parametrize("method", [{"rl": "ebft", "ebft": {"mode": "strided"}}, {"rl": "ebft"}, {"rl": "grpo"}])
def test_partitioned_parameters(make, monkeypatch, method):
    monkeypatch.setattr("ebft.methods.base_config.find_spec", lambda name: object())
    reward = {"trl": {"reward_funcs": ["os.path.join"]}} if method["rl"] == "grpo" else {}
    for given in ("zero3", "zero3_offload", {"zero_optimization": {"stage": 3}}):
        check_deepspeed(make(**method, **reward, deepspeed=given))
    lora = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
    served = {"rl": "ebft", **lora, "trl": {"use_vllm": True}}
    with pytest.raises(ConfigError, match="ZeRO-3 sends no adapter to a vLLM server"):
        check_deepspeed(make(**served, deepspeed="zero3"))
    for name, value in (("rollout_tokens_per_pass", 64), ("single_pass", True)):
        strided = {"rl": "ebft", "ebft": {"mode": "strided", name: value}}
        make(**strided, deepspeed="zero2")
        for sharded in ({"deepspeed": "zero3"}, {"fsdp": True}):
            with pytest.raises(ConfigError, match=f"{name} is not supported with FSDP2 and DeepSpeed ZeRO"):
                check_runnable(make(**strided, **sharded))


@pytest.mark.parametrize(("keys", "message"), [
    ({"optimizer": "paged_adamw_8bit"}, "Needed for training: optimizer: paged_adamw_8bit: You need to"),
    ({"use_ray": True}, "Needed for training: use_ray requires the package ray: pip install 'ebft[ray]'"),
    ({"load_in_4bit": True, "adapter": "qlora"}, "Needed for training on a GPU: load_in_4bit requires the package bit"),
    ({"liger_rope": True}, "Needed for training on a GPU: liger_rope requires the package liger-kernel: pip install"),
])  # fmt: skip
def test_a_missing_package_is_a_warning_of_the_check_and_an_error_of_training(make, monkeypatch, keys, message):
    monkeypatch.setattr(import_module("transformers.trainer_optimizer"), "is_bitsandbytes_available", lambda: False)
    for module in ("methods.sft", "run.checks"):
        monkeypatch.setattr(f"ebft.{module}.find_spec", lambda name: None)
    config = make(lora_r=8, lora_alpha=16, lora_target_linear=True, **keys) if "adapter" in keys else make(**keys)
    _, said = warned(check_runnable, config=config, elsewhere=True)
    (found,) = said
    assert found.startswith(message)
    trains = check_machine if "on a GPU" in message else check_runnable
    of_gpu = (Machine(has_accelerator=True, supports_bf16=True),) if "on a GPU" in message else ()
    if "use_ray" not in keys:  # which `ebft train` reports when it plans the launch
        with pytest.raises(MissingPackageError, match=re.escape(message.partition(": ")[2])):
            trains(config, *of_gpu)


def test_the_processes_are_those_that_accelerate_starts(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a job scheduler
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert launched_processes() == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launched_processes() == 2


def test_the_doctor_counts_the_logits_that_a_step_keeps(make, monkeypatch):
    monkeypatch.setattr("ebft.methods.base_config.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="chunked_cross_entropy is not supported with ZeRO-3"):
        check_runnable(make(deepspeed="zero3", chunked_cross_entropy=True))
    for keys, keeps in (({}, False), ({"chunked_cross_entropy": False}, True), ({"torch_compile": True}, True),
                        ({"deepspeed": "zero3"}, True), ({"deepspeed": "zero2"}, False)):  # fmt: skip
        assert make(**keys).method.keeps_logits(make(**keys)) is keeps


@pytest.mark.parametrize(("keys", "message"), [
    ({"base_model": "outputs/a", "output_dir": "outputs/x/../a/"}, "is the folder of base_model, whose files"),
    ({"base_model": "smollm2-135m", "output_dir": "./smollm2-135m"}, "is the folder of base_model"),
    ({"base_model": "outputs/a/checkpoint-2", "output_dir": "outputs/a"}, "checkpoint-2, which a new run moves away"),
])  # fmt: skip
def test_the_output_is_not_where_training_starts_from(make, tmp_path, monkeypatch, keys, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/a/checkpoint-2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        check_runnable(make(**keys))


def test_the_model_is_sharded_over_all_processes(make, tmp_path):
    config = make(fsdp=True, dp_shard_size=4, output_dir=str(tmp_path))
    check_runnable(config, processes=4)
    check_runnable(config, elsewhere=True)
    with pytest.raises(ConfigError, match="dp_shard_size: 4, but the model is sharded over 2 processes"):
        check_runnable(config, processes=2)
