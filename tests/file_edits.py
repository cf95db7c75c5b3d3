"""Changes of files in a folder: a `Change` is a function of the folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], Any]
GONE = object()  # a key that is removed
WEIGHTS = "model.safetensors"


def unchanged(folder: Path) -> None:
    pass


def then(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def write(name: str, content: str | bytes | dict) -> Change:
    text = json.dumps(content) if isinstance(content, dict) else content

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def edited(name: str, edit: Callable[[dict], dict]) -> Change:
    """Change the object in a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(edit(json.loads((folder / name).read_text()))))


def settings(name: str = "config.json", **values: Any) -> Change:
    """Change keys of a JSON file."""
    return edited(name, lambda found: {key: own for key, own in {**found, **values}.items() if own is not GONE})


def tensors(edit: Callable[[dict], dict], name: str = WEIGHTS) -> Change:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(edit(load_file(folder / name)), folder / name, metadata={"format": "pt"})

    return change


def values(edit: Callable[[Any], Any], part: str = "", name: str = WEIGHTS) -> Change:
    """Change the tensors whose name contains `part`."""
    return tensors(lambda found: {key: edit(value) if part in key else value for key, value in found.items()}, name)


def named(rename: Callable[[str], str | None], name: str = WEIGHTS) -> Change:
    """Rename tensors; those without a new name are left out."""
    return tensors(lambda found: {new: value for key, value in found.items() if (new := rename(key))}, name)


def pickled(name: str, zipped: bool = True, **more: Any) -> Change:
    """Save the tensors of a file, and `more`, with torch.save instead, and change the names of files in an index."""
    new = lambda old: old.replace("model", "pytorch_model", old.startswith("model")).replace(".safetensors", ".bin")

    def change(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        path = folder / name
        to = path.with_name(new(path.name))
        torch.save({**load_file(path), **more}, to, _use_new_zipfile_serialization=zipped)
        path.unlink()
        index = path.with_name(f"{WEIGHTS}.index.json")
        if index.is_file():
            found = json.loads(index.read_text())
            found["weight_map"] = {key: new(file) for key, file in found["weight_map"].items()}
            index.write_text(json.dumps(found))
            if not any(path.parent.glob("*.safetensors")):
                index.rename(path.with_name(new(index.name)))

    return change


def as_mxfp4(folder: Path) -> dict[str, Any]:
    """Store the fused experts of a model in MXFP4, with random values, which are returned."""
    import torch
    from safetensors.torch import load_file, save_file

    expected, levels = {}, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = stored.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()  # the low bits first
            values = levels[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * 2.0 ** (scales[..., None].float() - 127)
            expected[name] = values.flatten(-2).transpose(1, 2)
        save_file(stored, path, metadata={"format": "pt"})
    settings(quantization_config={"quant_method": "mxfp4"})(folder)
    return expected
