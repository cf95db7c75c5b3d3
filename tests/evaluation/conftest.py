"""A base model with distributions far from uniform, an adapter on it, another whole model, and rows to measure on."""

import json

import pytest
import torch
import yaml

from tests.export.models import save_adapter

WORDS = ("def", "return", "self", "value", "list", "index", "for", "in", "print", "open", "close", "name", "path")


@pytest.fixture(scope="session")
def models(tiny_llama_dir, tmp_path_factory):
    """Folders of `base`, `adapter` (LoRA on it, not the identity) and `other` (the base, moved a little)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    for name, scale in (("base", 0.15), ("other", 0.05)):
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.data.add_(torch.randn_like(weight) * scale)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save_adapter(folder / "adapter", folder / "base", task_type="CAUSAL_LM", target_modules="all-linear")
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Files of prompt/completion rows and of raw texts, of unequal lengths."""
    generator = torch.Generator().manual_seed(1)

    def words(count):
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,), generator=generator))

    folder = tmp_path_factory.mktemp("rows")
    pairs = [{"input": f"say {i}: {words(2 + i % 3)}\n", "output": words(5 + i % 4), "number": i} for i in range(9)]
    texts = [{"text": words(9 + 3 * i)} for i in range(6)]
    for name, values in (("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in values) + "\n")
    return folder


@pytest.fixture
def unmeasured(monkeypatch):
    """Models are loaded and checked, but not measured on tokens."""
    from ebft.scores import Scores

    monkeypatch.setattr("ebft.tools.evaluation.run.measure_tokens", lambda task, subject: Scores())


@pytest.fixture
def write_config(models, rows, tmp_path):
    """`write_config(kind, **keys)`: the path of a config that evaluates on pairs or texts."""

    def held_out(name, transform):
        return {"test_datasets": [{"path": str(rows / f"{name}.jsonl"), "type": transform}]}

    def blocks(length, samples):
        options = {"stride": length, "context_length": length, "generate_max_len": 4, "n_samples_per_prompt": samples}
        return {"rl": "ebft", "ebft": {"mode": "strided", **options}}

    plain = held_out("pairs", "ebft_strided_structured.transform")
    kinds = {
        "strided": blocks(3, samples=3) | plain,
        "texts": blocks(4, samples=6) | held_out("texts", "ebft_pretrain.transform"),
        "structured": {"rl": "ebft", "trl": {"num_generations": 3, "max_completion_length": 8}}
        | held_out("pairs", "tests.evaluation.metrics.prompt_rows"),
        "plain": plain,
    }

    def write(kind, **keys):
        config = {"base_model": str(models / "base"), "sequence_len": 64, "output_dir": str(tmp_path / "out")}
        config |= kinds[kind] | keys
        config["datasets"] = config["test_datasets"]
        path = tmp_path / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write
