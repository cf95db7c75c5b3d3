"""Descriptions of models by their contents."""

import pytest
import torch
from safetensors.torch import save_file

from ebft.models import files
from ebft.models.files import file_sample, model_folder, weights_fingerprint


@pytest.fixture(params=[2**26, 0], ids=["whole", "sampled"])
def sizes(request, monkeypatch):
    monkeypatch.setattr(files, "_ALL", request.param)
    monkeypatch.setattr(files, "_BLOCK", 64)


WEIGHTS = {"a": torch.arange(400.0), "b": torch.zeros(3, 5), "c": torch.ones(2, dtype=torch.bfloat16)}


def saved(folder, weights, **metadata):
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", metadata)
    return weights_fingerprint(folder)


def test_weights_are_the_same_in_another_file(sizes, tmp_path):
    whole = saved(tmp_path / "a", WEIGHTS, format="pt")
    assert saved(tmp_path / "b", dict(reversed(WEIGHTS.items())), other="x") == whole is not None
    for name, value in WEIGHTS.items():
        (tmp_path / "c").mkdir(exist_ok=True)
        save_file({name: value}, tmp_path / "c" / f"model-{name}.safetensors")
    assert weights_fingerprint(tmp_path / "c") == whole


@pytest.mark.parametrize(
    "changes",
    [
        {"a": torch.arange(400.0) + (torch.arange(400) == 200)},
        {"b": torch.zeros(5, 3)},
        {"b": torch.zeros(3, 5, dtype=torch.int32)},
        {"c": torch.full((2,), 1.0078125, dtype=torch.bfloat16)},
        {"d": torch.zeros(1)},
    ],
)
def test_other_weights(sizes, tmp_path, changes):
    assert saved(tmp_path / "a", WEIGHTS) != saved(tmp_path / "b", WEIGHTS | changes)


def test_other_files(sizes, tmp_path):
    file, content = tmp_path / "model.gguf", bytes(range(250)) * 40
    file.write_bytes(content)
    first = weights_fingerprint(tmp_path, "model.gguf")
    assert first == file_sample(file)
    for other in (b"x" + content[1:], content + b"x", content[:5000] + b"x" * 64 + content[5064:]):
        file.write_bytes(other)
        assert weights_fingerprint(tmp_path, "model.gguf") != first


def test_nothing_to_describe(tmp_path):
    assert weights_fingerprint(tmp_path) is None and weights_fingerprint(tmp_path, "x.gguf") is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert weights_fingerprint(tmp_path) is None
    assert model_folder(str(tmp_path)) == tmp_path
    assert model_folder("nobody/of-this-name") is None and model_folder("no id of the Hub/at all/") is None
