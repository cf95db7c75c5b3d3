"""The files of models and adapters: checks of their values, and hashes by which a resumed run notices changes.

transformers reports wrong values in config.json without the file or the key. The index of weights that FSDP2 saved in
parts is read without running code. Hashes of weights do not depend on the folder or on how weights are divided into
files; of large weights, a sample is read.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ebft.data.locate import lasting_name
from ebft.errors import ModelError, cause
from ebft.files import exists, json_object

SCORE, STEPS = "ForSequenceClassification", "ForTokenClassification"  # endings of class names
_TASKS = {"ForCausalLM": "CAUSAL_LM", SCORE: "SEQ_CLS", STEPS: "TOKEN_CLS"}  # of adapters, by class names
_HINT = "Give the folder or Hub id of a reward model with one score per text, such as one of reward_model: true."


def classifier_kind(folder: Path) -> str | None:
    """SCORE or STEPS for a folder with such a model or an adapter of one; None for other folders."""
    task, kind = _values(folder / "adapter_config.json").get("task_type"), _kind_of(_values(folder / "config.json"))
    return next((end for end in (SCORE, STEPS) if end == kind or task == _TASKS[end]), None)


def _kind_of(config: dict[str, Any]) -> str | None:
    names = [str(name) for name in config.get("architectures") or []]
    return next((end for end in (SCORE, STEPS) if any(name.endswith(end) for name in names)), None)


def refuse_classifier(folder: Path, use: str = "it cannot generate text") -> None:
    """Raise ModelError, with the reason `use`, if a folder has a reward model or an adapter of one."""
    kind = classifier_kind(folder)
    if kind is not None:
        hint = " It can be used in trl.reward_funcs of rl: grpo" if kind == SCORE else ""
        flag = "reward_model" if kind == SCORE else "process_reward_model"
        raise ModelError(f"{folder} is a model of {flag}: true, so {use}.{hint}")


def reward_problem(name: str, values: dict[str, Any] | None = None) -> str | None:
    """Why a model cannot give rewards, as a message: that of a folder, or with the `values` of config.json.

    None if it can, and for what is not a folder.
    """
    folder = Path(name).expanduser()
    if values is None and not exists(folder):
        return None
    if values is None and exists(folder / "adapter_config.json"):
        kind, labels = classifier_kind(folder), 1
    else:
        values = _values(folder / "config.json") if values is None else values
        kind = _kind_of(values)
        labels = len(values.get("id2label") or (0, 1))  # transformers leaves out its default of two
    if kind != SCORE:
        found = "classifies the tokens of steps" if kind == STEPS else "is not a sequence classifier"
        return f"trl.reward_funcs: {name} cannot give rewards, because it {found}. {_HINT}"
    if labels != 1:
        return f"trl.reward_funcs: {name} cannot give rewards, because it has {labels} outputs per text. {_HINT}"
    return None


def _values(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it cannot be read, which is reported where it is needed."""
    try:
        return json_object(path)
    except (OSError, ValueError):
        return {}


def read_object(path: Path, hint: str, key: str = "") -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError with a `hint` if it cannot be read; `key` is the config key."""
    try:
        return json_object(path)
    except (OSError, ValueError) as error:
        name = f"{key}: {path}" if key else path
        raise ModelError(f"{name} cannot be read as JSON ({cause(error)}). {hint}") from error


# Sizes with their least values. Models without layers are refused when they are loaded.
_SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "max_position_embeddings": 1,
    "num_key_value_heads": 1,
}
_DROPOUT = re.compile(r"(.*_)?(dropout|pdrop|layerdrop)(_rate|_prob|_p)?")  # keys with a probability
_QUANTISATIONS = {"quant_method", "load_in_4bit", "load_in_8bit"}
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "partial_rotary_factor", "attention_factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
_DIVISORS = ("rope_theta", "factor")  # which are not 0


def check_model_config(values: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ModelError for sizes and dtypes in the config.json at `path` that no model has; `key` is the config key.

    Some models have one size per layer, and models of several parts have their sizes in sections; both are left to
    transformers.
    """
    for name, least in _SIZES.items():
        value = values.get(name, least)
        is_default = value is None and ("text_config" in values or name == "num_key_value_heads")
        if isinstance(value, list) or is_default:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"{key}: {path}: {name}: invalid value {value!r:.60}; expected an integer of at least {least}."
            )
    for name in ("dtype", "torch_dtype"):
        value = values.get(name)
        if isinstance(value, str) and value != "auto" and not _is_dtype(value, values):
            raise ModelError(f"{key}: {path}: {name}: invalid value {value!r:.60}; expected a dtype such as bfloat16.")
    for section in (values, values.get("text_config")):
        _check_rope(section if isinstance(section, dict) else {}, path, key)
        for name, value in section.items() if isinstance(section, Mapping) else ():
            if _DROPOUT.fullmatch(name) and isinstance(value, int | float) and not 0 <= value < 1 and value is not True:
                raise ModelError(
                    f"{key}: {path}: {name}: invalid value {value!r:.60}; expected a number from 0 to less than 1."
                )
    quantised = values.get("quantization_config", {"quant_method": ""})
    if quantised is not None and not (isinstance(quantised, dict) and quantised.keys() & _QUANTISATIONS):
        raise ModelError(
            f"{key}: {path}: quantization_config: invalid value {quantised!r:.60}; expected an object with a "
            "quant_method. Remove it if the weights are not quantised."
        )


def key_with(value: Any, values: Mapping[str, Any]) -> str | None:
    """The key, with those of its sections, that has a value in the content of a config.json; None if none has."""
    for name, found in values.items():
        if isinstance(found, Mapping):
            inner = key_with(value, found)
            if inner is not None:
                return f"{name}.{inner}"
        elif found == value:
            return name
    return None


def _check_rope(values: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ModelError for a number of the rotary embedding that is a text, negative, or 0 where it divides.

    Some models have one set of them per kind of layer, and some a list with one number per layer.
    """
    sections = [("", {"rope_theta": values.get("rope_theta")})]
    sections += [(f"{name}.", values.get(name)) for name in ("rope_parameters", "rope_scaling")]
    for prefix, section in sections:
        for name, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict):
                sections.append((f"{prefix}{name}.", value))
            elif name in _ROPE_NUMBERS and (isinstance(value, str) or _is_negative(value, name in _DIVISORS)):
                raise ModelError(
                    f"{key}: {path}: {prefix}{name}: invalid value {value!r:.60}; expected a positive number."
                )


def _is_negative(value: Any, or_zero: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (not value >= 0 or (or_zero and value == 0))  # true for NaN


def _is_dtype(name: str, values: Mapping[str, Any]) -> bool:
    found = getattr(torch, name.removeprefix("torch."), None)
    return isinstance(found, torch.dtype) and (found.is_floating_point or "quantization_config" in values)


_HEADS = ("lm_head", "embed_out")  # names of output layers in transformers
_KINDS = {
    "CAUSAL_LM": "a language model",
    "SEQ_CLS": "a reward model (reward_model: true)",
    "TOKEN_CLS": "a process reward model (process_reward_model: true)",
}


def adapter_settings(name: str) -> dict[str, Any]:
    """The object in adapter_config.json; empty if it cannot be read, which is reported when it is loaded."""
    return _values(Path(lasting_name(name)).expanduser() / "adapter_config.json")


def task_problem(name: str, class_ending: str) -> str | None:
    """Why an adapter does not fit a model of the class, as a message; None if it does, or has no settings."""
    settings, wanted = adapter_settings(name), _TASKS[class_ending]
    found = settings.get("task_type")
    if not settings or found == wanted or (found is None and class_ending == "ForCausalLM"):
        return None
    of = _KINDS.get(found, f"another kind of model (task_type: {found!r:.60})") if isinstance(found, str) else "no task"
    merge = " Or merge it into its base model (ebft merge-lora), and set base_model to the result."
    return (
        f"lora_model_dir: {name} is an adapter of {of}, but this run trains {_KINDS[wanted]}, which has another output "
        f"layer. Remove lora_model_dir to train a new adapter.{merge if found == 'CAUSAL_LM' else ''}"
    )


def adapted_heads(targets: Any) -> Iterator[str]:
    """The output layers that PEFT's `target_modules` select: a regular expression, or suffixes of names."""
    if not isinstance(targets, str):
        given = [target for target in targets or () if isinstance(target, str)]
        yield from (name for name in _HEADS if name in given)
        return
    try:
        yield from (name for name in _HEADS if re.fullmatch(targets, name))
    except re.error:  # reported when the adapter is created
        return


def adapted_head(name: str) -> str | None:
    """The output layer that a saved adapter adapts; None if it does not, or replaces it by a trained copy."""
    settings = adapter_settings(name)
    excluded = set(adapted_heads(settings.get("exclude_modules")))
    return next((head for head in adapted_heads(settings.get("target_modules")) if head not in excluded), None)


WEIGHTS, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # folders in a checkpoint, as accelerate names them
INDEX = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        *("Size", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32"),
        *("int16", "int8", "uint8", "bool", "strided"),
    },
    **dict.fromkeys(
        ("pathlib", Path.__module__),  # another one since Python 3.13
        {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    ),
    "collections": {"OrderedDict"},
}


class ShardedReader(FileSystemReader):
    """Reads such a folder; its index without running code. Raises ValueError for an index with other classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(folder: Path) -> Metadata:
    """The index of such a folder. Raises OSError if there is none, and ValueError if it cannot be read."""
    try:
        with (folder / INDEX).open("rb") as file:
            found = _Unpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise errors of any type, such as MemoryError
        raise ValueError(f"the index cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("it is not an index of torch.distributed.checkpoint")
    return found


def check_chunks(index: Metadata) -> None:
    """Raise ValueError if the chunks of a tensor do not cover it, or if one is not in any file."""
    stored = {(part.fqn, tuple(part.offset)) for part in index.storage_data if part.offset is not None}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        covered = sum(prod(chunk.sizes) for chunk in entry.chunks)
        missing = [chunk for chunk in entry.chunks if prod(chunk.sizes) and (name, tuple(chunk.offsets)) not in stored]
        if covered != prod(entry.size) or missing:
            raise ValueError(f"parts of {name} are missing in the index")


def check_files(folder: Path) -> None:
    """Raise ValueError if a file of such a folder is missing or too short, by its index; OSError if it has no index."""
    index = read_index(folder)
    needed: dict[str, int] = {}  # the bytes that each file has at least
    try:
        check_chunks(index)
        for part in index.storage_data.values():
            needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    except (AttributeError, TypeError, OverflowError, RuntimeError) as error:  # values of other types
        raise ValueError(f"the index is damaged ({error})") from error
    for name, length in sorted(needed.items()):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        size = (folder / name).stat().st_size
        if size < length:
            raise ValueError(f"{name} has {size} bytes instead of at least {length}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
        return super().find_class(module, name)


_ALL = 2**26  # bytes; weights and files up to this size are read as a whole
_BLOCK = 2**14  # bytes read of each tensor of larger weights
_TENSORS = 4096  # at most this many of their tensors are sampled
_BLOCKS = 1024  # of larger files that are not safetensors
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
# Entries of JSON files about the place or the program that saved them, and the template, which is compared separately.
_LEFT_OUT = ("name_or_path", "is_local", "local_files_only", "transformers_version", "chat_template")


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the model `name`; for a Hub id, its folder in the cache. None if there is none."""
    folder = Path(lasting_name(name))
    if folder.is_dir():
        return folder
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a Hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_fingerprint(folder: Path, gguf_file: str | None = None) -> str | None:
    """The tensors of the model or the adapter in `folder`: their names, types and shapes, and a sample of each.

    None if there are no weights, or if they cannot be read, which is reported where they are loaded.
    """
    try:
        if gguf_file is not None:
            return file_sample(folder / gguf_file)
        files = _weight_files(folder)
        if files and files[0].suffix == ".safetensors":
            return _of_tensors(files)
        return _hash([file_sample(path) for path in files]) if files else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def tokenizer_fingerprints(folder: Path) -> dict[str, str]:
    """The hash of each file of the tokenizer in `folder`; of JSON files, that of their contents."""
    paths = {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    return {path.name: _of_file(path) for path in sorted(paths)}


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a JSON file of settings such as config.json, without those that do not affect the model."""
    values = _values(folder / name)
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _LEFT_OUT}


def file_sample(path: Path) -> str:
    """The hash of a file's size and contents; of more than 64 MiB, of 1,024 evenly spaced blocks."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _ALL:
            found.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers or PEFT load from a folder."""
    for name in ("adapter_model.safetensors", "model.safetensors", "pytorch_model.bin", "adapter_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / file for file in sorted(set(json_object(index)["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _of_tensors(files: list[Path]) -> str:
    tensors = sorted((name, *rest) for path in files for name, *rest in _tensors(path))
    reads_all = sum(end - start for *_, start, end in tensors) <= _ALL
    every = 1 if reads_all else -(-len(tensors) // _TENSORS)
    found = hashlib.sha256()
    for place, (name, dtype, shape, path, start, end) in enumerate(tensors):
        found.update(json.dumps([name, dtype, shape]).encode())
        if place % every:
            continue
        length = end - start if reads_all else min(end - start, _BLOCK)
        with path.open("rb") as file:
            file.seek(start + (end - start - length) // 2)
            found.update(file.read(length))
    return found.hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], Path, int, int]]:
    """Name, dtype, shape, file, start and end of each tensor of a safetensors file."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        if length > path.stat().st_size:
            raise ValueError("truncated")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], path, 8 + length + start, 8 + length + end


def _of_file(path: Path) -> str:
    try:
        if path.suffix == ".json":
            return _hash(settings_of(path.parent, path.name))
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # reported where it is loaded
        return ""


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
