"""Two processes with DDP, FSDP2 and DeepSpeed train as one does; checkpoints of each kind can be resumed by each."""

import json
import os
import shutil
from importlib import import_module

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ebft.run.training
from ebft.structured.grpo import RolloutGRPOTrainer
from ebft.tools.export.checkpoint import merge_sharded
from tests.run.crash import METHODS, TRL, config_of, run_processes
from tests.structured.short_run import FromThePrompt

pytestmark = pytest.mark.slow

PARTS = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
WHOLE = {"fsdp_version": 2, "fsdp_config": {"cpu_ram_efficient_loading": True}}
# Sampled noise of strided EBFT belongs to the documents; the other methods train on given completions. The reference
# model of GRPO is sharded, too. SFT ends with the weights of step 1: the worst ones, which are "the best" here. Adam
# divides by the size of gradients, so those near 0 would magnify rounding errors.
BEST = {"load_best_model_at_end": True, "greater_is_better": True}
REWARDED = {**TRL, "max_completion_length": 8, "beta": 0.1, "reward_funcs": ["tests.run.test_sharded.reward"]}
RUNS = {
    "sft": ("sft_full", {**BEST, "save_steps": 1, "save_total_limit": 3, "eval_steps": 1}),
    "sft, packed": ("sft_packed", {"eval_steps": 1}), "strided": ("strided_full", {}),
    "strided, adapter": ("strided", {}), "structured": ("structured_full", {}),
    "grpo": ("grpo_synced_reference", {"trl": REWARDED}),
}  # fmt: skip
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
OTHERS = {
    "structured, sampled": ("structured_full", {"gradient_checkpointing": True, "eval_steps": 1}),
    "structured, sampled, adapter": ("structured", REENTRANT),
    "grpo, sampled, accumulated": ("grpo_iterations", {"gradient_accumulation_steps": 2}),
    "strided, checkpoints": ("strided_full", {"gradient_checkpointing": True, "eval_steps": 1}),
    "strided, adapter, checkpoints": ("strided", {**REENTRANT, "eval_steps": 1}),
}
COMMON = {"gradient_accumulation_steps": 1, "adam_epsilon": 1e-4, "max_steps": 3, "save_steps": 2, "logging_steps": 1}
COMMON |= {"lr_scheduler": "constant", "auto_resume_from_checkpoints": False}
COMPARED = ("loss", "grad_norm", "ebft/alignment", "ebft/cfm_loss", "reward", "kl", "eval_ce_loss", "eval_cfm_loss")


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7 + len(ids)) for ids in completion_ids]


def inject():
    RolloutGRPOTrainer.backend = lambda self: FromThePrompt()


def check_that_one_process_reads_the_weights():
    inject()
    load = ebft.run.training.load_model

    def spy(*args, **kwargs):
        model = load(*args, **kwargs)
        ranks = [0, 0]
        has_weights = any(p.any() for name, p in model.named_parameters() if "norm" in name)
        torch.distributed.all_gather_object(ranks, has_weights)
        assert ranks == [True, False], ranks
        return model

    ebft.run.training.load_model = spy


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    """`trained(name, processes, **changes)`: output folder, final weights and logs; each run is made once."""
    made = {}

    def of(name, count, prepare=inject, **changes):
        key = name, count, str(changes)
        if key not in made:
            out = tmp_path_factory.mktemp("sharded") / "out"
            method, keys = (RUNS | OTHERS)[name]
            rows = METHODS[method][2].get("micro_batch_size", 2)
            rows *= METHODS[method][2].get("gradient_accumulation_steps", 1)
            keys = {**COMMON, "micro_batch_size": rows // count, **keys, **changes}
            ended = run_processes(config_of(method, inputs, out, **keys), count, prepare)
            assert [process.code for process in ended] == [0] * count, ended[0].output + ended[-1].output
            (weights,) = out.glob("*model.safetensors")
            logs = json.loads((out / "trainer_state.json").read_text())["log_history"]
            made[key] = out, load_file(weights), logs
        return made[key]

    return of


def assert_same(ours, theirs):
    for mine, other in zip(ours[2], theirs[2], strict=True):
        for key in COMPARED:
            assert (key in mine) == (key in other)
            if key in mine:
                assert mine[key] == pytest.approx(other[key], abs=1e-5, rel=1e-5), (key, mine)
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(trained, inputs, name):
    one = trained(name, 1)
    before = load_file(inputs / "model" / "model.safetensors")
    assert all("lora" in key or (value - before[key]).abs().max() > 1e-3 for key, value in one[1].items())
    assert_same(trained(name, 2), one)
    assert_same(trained(name, 2, check_that_one_process_reads_the_weights, **WHOLE), one)


def test_muon(trained, inputs):
    """Its products round to bfloat16, and magnify small singular values, so that equal gradients differ afterwards."""
    before = load_file(inputs / "model" / "model.safetensors")
    (_, one, _), *others = (trained("sft, packed", count, optimizer="muon", **keys)
                            for count, keys in ((1, {}), (2, {}), (2, WHOLE)))  # fmt: skip
    for (_, other, _), most in zip(others, (1e-5, 0.06)):
        for name, value in one.items():
            assert (other[name] - value).norm() < most * (value - before[name]).norm(), name


ADAPTED = {"adapter": "lora", "lora_r": 4, "lora_target_modules": ["q_proj"], "chat_template": "chatml"}
ADAPTED |= {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_target_linear": False}
IN_8, IN_4 = {"load_in_8bit": True, "adapter": "lora"}, {"load_in_4bit": True, "adapter": "qlora"}


@pytest.mark.parametrize("bits", [{}, IN_8, IN_4])
@pytest.mark.parametrize("name", ["sft", "strided", "structured"])
def test_fused_experts(name, bits, trained, moe):
    keys = {**ADAPTED, **bits, "quantize_moe_experts": bool(bits), "base_model": str(moe)}
    one = trained(name, 1, **keys)
    assert all(value.any() and value.dtype == torch.float32 for value in one[1].values())
    keys |= {"fsdp": True, "fsdp_config": {**PARTS["fsdp_config"], "activation_checkpointing": name == "sft"}}
    assert_same(trained(name, 2, **keys), one)


@pytest.mark.parametrize("name", ["strided", "strided, adapter"])
def test_checkpoints_resume_with_any_number_of_processes_and_are_merged(trained, name, tmp_path):
    one, parts = trained(name, 1), trained(name, 2, **PARTS)
    whole = trained(name, 2, check_that_one_process_reads_the_weights, **WHOLE)
    assert_same(parts, one)
    files = {path.name for path in (parts[0] / "checkpoint-2").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0"} < files
    assert not files & {"model.safetensors", "adapter_model.safetensors", "optimizer.pt"}
    of_one = {path.name for path in (one[0] / "checkpoint-2").iterdir()}
    assert {path.name.replace("_0.", ".") for path in (whole[0] / "checkpoint-2").glob("[!_]*[!1].*")} == of_one
    for saved, count, kind in ((parts, 1, {}), (parts, 2, PARTS), (whole, 1, {}), (one, 2, WHOLE), (one, 2, PARTS)):
        assert_same(trained(name, count, resume_from_checkpoint=str(saved[0] / "checkpoint-2"), **kind), one)
    merged = merge_sharded(parts[0] / "checkpoint-2", tmp_path / "merged").folder
    found = {path.name: path.read_bytes() for path in merged.iterdir()}
    expected = {path.name: path.read_bytes() for path in (whole[0] / "checkpoint-2").iterdir() if path.name in found}
    assert found == expected and any(file.endswith("model.safetensors") for file in found)
    if name == "strided":
        assert AutoModelForCausalLM.from_pretrained(merged).config.hidden_size == 16
        shutil.copytree(parts[0] / "checkpoint-2", tmp_path / "damaged")
        (tmp_path / "damaged" / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
        with pytest.raises(OSError, match="__1_0.distcp"):
            merge_sharded(tmp_path / "damaged")


def on_cpu():
    inject()
    start_deepspeed()


def start_deepspeed():
    """Start DeepSpeed with a process group, without which each process would be the only one: refused on CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # an extension, which takes a compiler minutes
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    ebft.run.training.check_machine = lambda *_: None
    arguments = ebft.run.trainer.training_kwargs
    ebft.run.trainer.training_kwargs = lambda *given: arguments(*given) | {"use_cpu": False}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_with_zero_train_as_one(trained, name):
    pytest.importorskip("deepspeed")  # Linux only
    keys = {"optimizer": "adamw_torch"}  # Adam of PyTorch, which DeepSpeed supports on CPU
    one, two = trained(name, 1, **keys), trained(name, 2, on_cpu, deepspeed="zero2", **keys)
    assert_same(two, one)
    checkpoint = str(two[0] / "checkpoint-2")
    assert_same(trained(name, 2, on_cpu, deepspeed="zero2", resume_from_checkpoint=checkpoint, **keys), one)
    three = trained(name, 2, on_cpu, deepspeed="zero3", **keys)
    assert_same(three, one)
    checkpoint = str(three[0] / "checkpoint-2")
    assert_same(trained(name, 2, on_cpu, deepspeed="zero3", resume_from_checkpoint=checkpoint, **keys), one)


@pytest.mark.parametrize("name", OTHERS)
def test_zero_3_trains_as_ddp_does(trained, name):
    """Two processes with the same random states: completions of different lengths are sampled from the whole model."""
    pytest.importorskip("deepspeed")
    keys = {"optimizer": "adamw_torch"}
    ddp = trained(name, 2, lambda: None, **keys)
    assert_same(trained(name, 2, start_deepspeed, deepspeed="zero3", **keys), ddp)
