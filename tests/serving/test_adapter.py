"""Rank limits and slots for adapters."""

import json

import pytest

from ebft.errors import ConfigError
from ebft.serving.command import adapter_slots, max_lora_rank


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (2, 8), (16, 16), (17, 32), (300, 320), (512, 512)])
def test_the_smallest_limit_that_holds_the_adapter(make_config, rank, limit):
    assert max_lora_rank(make_config(adapter="lora", lora_r=rank)) == limit


def test_without_an_adapter(make_config):
    assert max_lora_rank(make_config()) is None


def test_too_large_a_rank(make_config):
    with pytest.raises(ConfigError, match="lora_r: the adapter's rank 600 exceeds the maximum of 512"):
        max_lora_rank(make_config(adapter="lora", lora_r=600))


def test_modules_trained_in_full(make_config):
    with pytest.raises(ConfigError, match=r"lora_modules_to_save.*lm_head.*trl.use_vllm: false"):
        max_lora_rank(make_config(adapter="lora", lora_modules_to_save=["lm_head"]))


@pytest.mark.parametrize(
    ("saved", "limit"),
    [({"r": 12}, 16), ({"r": 8, "rank_pattern": {"q_proj": 40}, "modules_to_save": None}, 64)],
)
def test_the_rank_of_a_saved_adapter(make_config, tmp_path, saved, limit):
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    assert max_lora_rank(make_config(adapter="lora", lora_model_dir=str(tmp_path))) == limit


@pytest.mark.parametrize("text", [None, "{", "{}", "[]"])
def test_a_saved_adapter_that_cannot_be_read(make_config, tmp_path, text):
    if text is not None:
        (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match="lora_model_dir: cannot read a LoRA rank from .*adapter_config.json"):
        max_lora_rank(make_config(adapter="lora", lora_model_dir=str(tmp_path)))


def test_slots_grow_with_the_batches_made_ahead():
    assert (adapter_slots(1), adapter_slots(4)) == (3, 6)
