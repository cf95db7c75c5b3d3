"""A tiny chat model, an adapter on it, and a fully trained one, saved as `ebft train` saves them."""

import json

import pytest

from tests.export.models import save_adapter
from tests.structured.conftest import chat_model, make_chat_tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """{"base": ..., "adapter": ..., "full": ...}."""
    root, tokenizer = tmp_path_factory.mktemp("inference"), make_chat_tokenizer()
    found = {name: root / name for name in ("base", "adapter", "full")}
    for seed, name in enumerate(("base", "full")):
        chat_model(tokenizer, seed=seed).save_pretrained(found[name])
    save_adapter(found["adapter"], found["base"], target_modules=["q_proj", "down_proj"])
    for folder in found.values():
        tokenizer.save_pretrained(folder)
    return found


@pytest.fixture
def config_file(folders, tmp_path):
    """A config whose output_dir is the adapter, or the full model."""

    def write(kind="adapter", **changes):
        values = {"base_model": str(folders["base"]), "output_dir": str(folders[kind]), "sequence_len": 64}
        if kind == "adapter":
            values |= {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"]}
        values["ebft"] = {"mode": "structured", "use_whitening": True, "feature_layers": [0.5], "diversity_coef": 0.5}
        values |= {"rl": "ebft", "datasets": [{"path": "unused", "type": "ebft_opencode.transform"}], **changes}
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(values))
        return path

    return write
