"""Files of weights that are written one tensor at a time, read by safetensors."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

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
        ours, theirs = (value.contiguous().flatten().view(torch.uint8) for value in (found[name], tensor))
        assert ours.equal(theirs), name
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("tensors", [{"a": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(1)}])
def test_tensors_that_do_not_fit_the_layout_make_no_file(tmp_path, tensors):
    with pytest.raises(AssertionError):
        write_tensors(tmp_path / "a", {"a": torch.ones(2), "b": torch.ones(1)}, tensors.items())
    assert not (tmp_path / "a").exists()
