"""Writing a safetensors file one tensor at a time. The functions of safetensors need all tensors of a file in memory.

The format (https://huggingface.co/docs/safetensors, "Format"): the length of the header as 8 bytes, the header as JSON
with the dtype, shape and place of each tensor, and the bytes of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ebft.errors import ModelError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file with the tensors of `layout`, which may be on the meta device, by their names.

    `tensors` yields the same names once each, in any order, with values of the same dtype and shape.
    Raises ModelError if it does not, or if safetensors has no name for a dtype.
    """
    # Wide dtypes first, so that each tensor is aligned, as safetensors does it.
    names = sorted(layout, key=lambda name: (-layout[name].itemsize, name))
    places, end = {}, 0
    for name in names:
        places[name] = (end, end := end + layout[name].nbytes)
    header = _header({name: _entry(name, layout[name], places[name]) for name in names})
    written = set()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        for name, tensor in tensors:
            expected = layout.get(name)
            if expected is None or name in written:
                raise ModelError(f"{path}: {name} is not a weight of this file, or is written twice.")
            if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
                raise ModelError(
                    f"{path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected {expected.dtype} of "
                    f"shape {tuple(expected.shape)}."
                )
            file.seek(start + places[name][0])
            file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
            written.add(name)
        if missing := layout.keys() - written:
            raise ModelError(f"{path}: weights are missing: {', '.join(sorted(missing)[:3])}")


def _entry(name: str, tensor: Tensor, place: tuple[int, int]) -> dict[str, object]:
    if tensor.dtype not in _NAMES:
        raise ModelError(f"{name} has the dtype {tensor.dtype}, which cannot be written in safetensors format.")
    return {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": list(place)}


def _header(entries: dict[str, dict[str, object]]) -> bytes:
    """The header, padded to a multiple of 8 bytes, with the framework that transformers expects."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
