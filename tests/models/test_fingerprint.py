"""Descriptions of models by their contents."""

import pytest
import torch
from safetensors.torch import save_file

from ebft import files
from ebft.files import sample_hash, weights_hash


def saved(folder, weights, file="model.safetensors", **metadata):
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / file, metadata)
    return weights_hash(folder)


@pytest.mark.parametrize("whole_up_to", [2**26, 0])
def test_weights_are_the_same_in_another_file_and_no_others_are(whole_up_to, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_ALL", whole_up_to)
    monkeypatch.setattr(files, "_BLOCK", 64)
    weights = {"a": torch.arange(400.0), "b": torch.zeros(3, 5), "c": torch.ones(2, dtype=torch.bfloat16)}
    whole = saved(tmp_path / "a", weights, format="pt")
    assert saved(tmp_path / "b", dict(reversed(weights.items())), other="x") == whole is not None
    for name, value in weights.items():
        parts = saved(tmp_path / "c", {name: value}, f"model-{name}.safetensors")
    assert parts == whole
    for change in (
        {"a": torch.arange(400.0) + (torch.arange(400) == 200)},
        {"b": torch.zeros(5, 3)},
        {"b": torch.zeros(3, 5, dtype=torch.int32)},
        {"c": torch.full((2,), 1.0078125, dtype=torch.bfloat16)},
        {"d": torch.zeros(1)},
    ):
        assert saved(tmp_path / "d", weights | change) != whole
    file, content = tmp_path / "model.gguf", bytes(range(250)) * 40
    file.write_bytes(content)
    first = weights_hash(tmp_path, "model.gguf")
    assert first == sample_hash(file)
    for other in (b"x" + content[1:], content + b"x", content[:5000] + b"x" * 64 + content[5064:]):
        file.write_bytes(other)
        assert weights_hash(tmp_path, "model.gguf") != first
