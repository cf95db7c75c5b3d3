"""Files of weights that are written one tensor at a time, read by safetensors."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ebft.tools.export.checkpoint import _NAMES, write_tensors


def some_tensors() -> dict[str, torch.Tensor]:
    """One tensor of each dtype, among them a scalar, an empty one and one that is not contiguous."""
    found = {
        f"w.{name}": (torch.arange(15).reshape(3, 5) % 2).to(dtype)
        for dtype, name in _NAMES.items()
        if "FNUZ" not in name
    }
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "transposed": torch.randn(4, 6).T}


def test_safetensors_reads_what_is_written_in_any_order(tmp_path):
    tensors = some_tensors()
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_tensors(tmp_path / "a.safetensors", layout, reversed(tensors.items()))
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert (
            found[name].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        ), name
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_file_is_that_of_safetensors(tmp_path):
    """With one dtype of each size, as in models; the order of others is up to the writer."""
    kept = ("w.F32", "w.BF16", "w.U8", "scalar", "empty", "transposed")
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items() if name in kept}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    write_tensors(tmp_path / "ours", tensors, tensors.items())
    ours, theirs = (parsed((tmp_path / name).read_bytes()) for name in ("ours", "theirs"))
    assert ours == theirs


def parsed(content: bytes) -> tuple[dict, bytes]:
    """The header and the data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


@pytest.mark.parametrize("tensors", [{"a": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(1)}])
def test_tensors_that_do_not_fit_the_layout_make_no_file(tmp_path, tensors):
    with pytest.raises(AssertionError):
        write_tensors(tmp_path / "a", {"a": torch.ones(2), "b": torch.ones(1)}, tensors.items())
    assert not (tmp_path / "a").exists()
