"""Checks of rows and models: processes that train other models, modules that cannot be adapted."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.config.section import flat_settings
from ebft.errors import ConfigError
from ebft.run import checks
from ebft.run.checks import check_adapted_experts
from tests.config.conftest import make

__all__ = ["make"]

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


@pytest.fixture
def compare(make, monkeypatch):
    """`compare(keys, keys)`: what two processes with these arguments and keys find."""

    def check(precision="no", rows=ROWS, held_out=None, checkpoint=None, **keys):
        checks.check_same_everywhere(make(**keys), precision, rows, held_out, checkpoint)

    def of(first, second):
        told = []
        monkeypatch.setattr("accelerate.utils.gather_object", lambda found: told.extend(found) or told)
        check(**first)
        check(**second)

    return of


@pytest.mark.parametrize(("other", "name"), [
    ({"learning_rate": 0.1}, "learning_rate"),
    ({"rl": "ebft", "ebft": {"mode": "strided", "stride": 3}}, "ebft.mode, ebft.stride, rl"),
    ({"datasets": [{"path": "some/data", "type": "completion", "split": "test"}]}, "datasets"),
    ({"precision": "bf16"}, "the precision in effect"),
    ({"rows": [ROWS[0], {"input_ids": [4, 6]}]}, "the training rows"), ({"held_out": ROWS}, "the held-out rows"),
    ({"checkpoint": "out/checkpoint-4"}, "the checkpoint to resume from"),
])  # fmt: skip
def test_what_must_be_the_same(compare, other, name):
    with pytest.raises(ConfigError, match=f"rank 1 differs from rank 0 in {name}. Start all with the same"):
        compare({}, other)


def test_what_machines_may_have_in_other_places(compare, make):
    data = lambda path: [{"path": path, "type": "completion"}]
    elsewhere = {"base_model": "/b/model", "output_dir": "/b/out", "wandb_name": "b", "datasets": data("/b/two.jsonl")}
    here = {"checkpoint": "/a/checkpoint-4", "datasets": data("/data/one.jsonl")}
    compare(here, {"checkpoint": "/b/checkpoint-4", **elsewhere})
    assert {name for name, _ in flat_settings(make())} >= checks._OF_MACHINES


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # of PEFT
def test_adapters_of_experts_exclude_what_replaces_weights(make):
    settings = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("mixtral", **settings, vocab_size=32, num_key_value_heads=1, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config)
    keys = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
    refused = {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}
    check_adapted_experts(make(**keys, **refused), model)
    model = get_peft_model(model, LoraConfig(target_modules=["w1", "w2", "w3"]))
    check_adapted_experts(make(**keys), model)
    with pytest.raises(
        ConfigError, match="lora_target_modules, which adapts the fused experts .* with auto_wrap_policy"
    ):
        check_adapted_experts(make(**keys, **refused), model)
