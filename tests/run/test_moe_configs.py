"""Configs of mixtures of experts as axolotl's documents print them, on small random models of the families."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ebft import load_config, train
from tests.models.multimodal import save_multimodal
from tests.strided.families import tiny_model
from tests.structured.conftest import CHATML

CONFIGS = Path(__file__).parents[1] / "config" / "configs" / "moe"
FAMILIES = {"gemma4": "gemma4", "nemotron": "nemotron_h", "qwen35": "qwen3_5_moe_text"}
TEMPLATE = CHATML.replace("<|im_start|>", "<|begin|>").replace("<|im_end|>", "<|end|>")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_trains_a_step(path, tiny_llama_dir, tmp_path):
    kind, base = FAMILIES[path.stem.split("-")[0]], tmp_path / "base"
    if kind == "gemma4":
        save_multimodal(kind, base)
    else:
        tiny_model(kind, vocab_size=512).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    chat = [{"from": "human", "value": "What is one and one?"}, {"from": "gpt", "value": "It is two, as always."}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"conversations": chat}) for _ in range(24)))
    keys = {"base_model": base, "datasets.0.path": tmp_path / "rows.jsonl", "datasets.0.split": "train"}
    keys |= {"output_dir": tmp_path / "out", "max_steps": 1, "sequence_len": 128, "chat_template": "tokenizer_default"}
    keys |= {"dataset_prepared_path": "", "optimizer": "adamw_torch", "special_tokens.pad_token": "<|end|>"}
    keys |= {"evals_per_epoch": "", "saves_per_epoch": "", "wandb_project": ""}
    result = train(load_config(path, [f"{key}={value}" for key, value in keys.items()]))
    assert result.metrics["train_loss"] > 0
    saved = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert (b"experts" in saved) == ("nemotron" not in path.stem)
