"""Merging a LoRA adapter into its base model, one shard at a time.

At any time, the adapter, the weights of one part (usually one weight), and what they are computed from are in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ebft.catalog import MARK, lasting_name
from ebft.config.keys.models import ModelSettings
from ebft.errors import ModelError, doing
from ebft.files import ADAPTER_CONFIG as CONFIG
from ebft.files import MODEL_WEIGHTS, RUN_FILE, file_hash, write_text
from ebft.models.adapter import check_tensors
from ebft.models.load import as_trained, weights_dtype
from ebft.models.pretrained import GENERATION_CONFIG, find_base_model, find_model, text_model_config
from ebft.models.weight_files import WeightFiles, adapter_file
from ebft.run.config.schema import RunConfig
from ebft.run_files import RECORDS, keys_of_base, read_object
from ebft.tools.export import adapter as adapters
from ebft.tools.export import checkpoint as checkpoints
from ebft.transformers_internals import WeightGroup, convert_weights, revert_weights, weight_groups

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
_NOT_COPIED = ("*.safetensors", "*.index.json", *checkpoints.OTHER_FORMATS, "*.onnx", "README.md", MARK, ".*", *RECORDS)


@dataclass(frozen=True)
class MergeSource:
    """An adapter and the base model that it was trained on, both folders or Hub ids.

    `tokenizer`: folder whose tokenizer files replace the base model's. `quantised`: the keys of a run in which
    bitsandbytes quantised the base weights. `base_config`: folder or Hub id of another configuration than the base's.
    """

    adapter: Path
    base: str
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer: Path | None = None
    quantised: ModelSettings | None = None
    base_config: str | None = None


@dataclass(frozen=True)
class MergeResult:
    """The folder of a merged model, the size of its weights in bytes, and numbers of shards."""

    folder: Path
    total_size: int
    largest_shard: int  # bytes
    shards: int
    resumed: int  # shards that a previous, interrupted merge had written
    untied: bool


def merge_adapter(
    source: MergeSource, to: Path, max_shard_size: str | None = None, on_shard: Callable[[int, int], None] | None = None
) -> MergeResult:
    """Write the base model with the adapter merged into its weights to the folder `to`.

    The result has the values of PEFT's `merge_and_unload`, which needs the whole model in memory, except for weights
    that are tied in the base model: PEFT changes both if the adapter changes one. Weights in MXFP4 become bfloat16. The
    shards are as large as the base model's unless `max_shard_size` (such as "5GB") is given. If a merge was
    interrupted, a second call continues it. `on_shard` is called with the number of finished shards and of all shards.
    Raises ModelError if the adapter or the base model cannot be merged.
    """
    config, path = adapters.read_lora_config(source.adapter, source.base), adapter_file(source.adapter)
    with WeightFiles([path]) as file:
        weights = {name: file.read(name) for name in check_tensors(path)}
    base = checkpoints.base_folder(source.base, source.revision)
    base_config = _base_config(base, source)
    checkpoint = checkpoints.read_checkpoint(base, checkpoints.DequantisedFiles)
    text_config = text_model_config(base_config)
    plain = adapters.empty_model(text_config, source.trust_remote_code)
    rounding = None if source.quantised is None else adapters.BitsAndBytesRounding(plain, source.quantised)
    adapter = adapters.attach(adapters.empty_model(text_config, source.trust_remote_code), config, weights)
    del weights
    merge = Merge(plain, adapter, checkpoint.weights, rounding)
    part_of = {key: part for part in merge.parts for key in part.outputs}
    # In the order of the checkpoint; weights that are no longer tied come last.
    places = {key: place for place, key in enumerate(checkpoint.weights)}
    keys = sorted(part_of, key=lambda key: places.get(key, len(places)))
    # Not views, which would count with the size of the whole.
    outputs = {key: torch.empty_like(part_of[key].outputs[key]) for key in keys}
    largest = max(sum(outputs[key].nbytes for key in own if key in outputs) for own in checkpoint.files.values())
    with doing("reading --max-shard-size"):
        split = split_torch_state_dict_into_shards(outputs, max_shard_size=max_shard_size or largest)
    shards = split.filename_to_tensors
    checkpoints.begin(to, _identity(source, base, checkpoint, shards))
    resumed = 0
    for number, (name, keys) in enumerate(shards.items(), start=1):
        if (to / name).is_file():
            resumed += 1
        else:
            layout = {key: part_of[key].outputs[key] for key in keys}
            checkpoints.write_tensors(to / name, layout, _merged(merge, checkpoint, part_of, keys))
        if on_shard is not None:
            on_shard(number, len(shards))
    _copy_other_files(base, source.tokenizer, to)
    if (source.adapter / GENERATION_CONFIG).is_file():  # which ends replies at the end of a turn
        shutil.copyfile(source.adapter / GENERATION_CONFIG, to / GENERATION_CONFIG)
    if len(shards) > 1:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text(to / f"{MODEL_WEIGHTS[0]}.index.json", json.dumps(index, indent=2) + "\n")
    if merge.unties:
        base_config.tie_word_embeddings = base_config.get_text_config().tie_word_embeddings = False
    base_config.get_text_config().vocab_size = adapter.vocab_size
    write_text(to / "config.json", json.dumps(json.loads(base_config.to_json_string()), indent=2) + "\n")
    (to / checkpoints.PROGRESS).unlink()
    largest = max(sum(part_of[key].outputs[key].nbytes for key in keys) for keys in shards.values())
    return MergeResult(to, split.metadata["total_size"], largest, len(shards), resumed, merge.unties)


def _base_config(base: Path, source: MergeSource) -> Any:
    name = base if source.base_config is None else find_model(source.base_config, "base_model_config")
    with doing(f"reading the config of {name}"):
        found = AutoConfig.from_pretrained(name, trust_remote_code=source.trust_remote_code)
    quantised = getattr(found, "quantization_config", None)  # absent in most models
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if method not in (None, "mxfp4"):
        raise ModelError(f"The weights in {base} are quantised ({method}). Give the original model (--base-model).")
    if method is not None:
        del found.quantization_config
    return found


def _identity(source: MergeSource, base: Path, checkpoint: WeightFiles, shards: dict[str, list[str]]) -> str:
    """Everything that the merged weights depend on; files of the base model by size and time, as they are large."""
    files = {str(path.relative_to(base)): path.resolve().stat() for path in checkpoint.files}
    run = source.quantised
    found = {
        "adapter": [file_hash(path) for path in (source.adapter / CONFIG, adapter_file(source.adapter))],
        "base": [str(base), {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()}],
        "quantised": run
        and [*(run.load_in_4bit, run.quantize_moe_experts, run.bnb_config_kwargs.four_bit, str(weights_dtype(run)))],
        "shards": shards,
    }
    return json.dumps(found, sort_keys=True)


def _merged(
    merge: Merge, checkpoint: WeightFiles, part_of: Mapping[str, WeightPart], keys: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """The merged weights `keys`. One part is in memory at a time, with the pages that it is read from."""
    waiting = set(keys)
    for key in keys:
        if key in waiting:
            with checkpoint:
                values = merge.compute(part_of[key], checkpoint.read)
            yield from ((own, values[own]) for own in values if own in waiting)
            waiting -= values.keys()
            del values


def _copy_other_files(base: Path, tokenizer: Path | None, to: Path) -> None:
    for path in base.iterdir():
        if path.is_file() and path.name != "config.json" and not any(map(path.match, _NOT_COPIED)):
            shutil.copyfile(path, to / path.name)
    if tokenizer is None or not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        return
    for name in TOKENIZER_FILES:
        (to / name).unlink(missing_ok=True)  # a file that only the base model's tokenizer has would change the other
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, to / name)


@dataclass(eq=False)
class WeightPart:
    """Weights that are written together; `outputs` are on the meta device, by their names in the checkpoint."""

    groups: list[WeightGroup]
    layers: list[tuple[LoraLayer, list[str]]] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)  # weights that the checkpoint does not have: {name: source}
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [key for group in self.groups for key in group.keys]

    @property
    def names(self) -> list[str]:
        """Their names in the model."""
        return [name for group in self.groups for name in group.names]


class Merge:
    """The merge of an adapter into the weights of a checkpoint, one part at a time.

    `model` is the base model on the meta device, without adapter. Raises ModelError if the checkpoint has no weight
    that the adapter changes, or if transformers cannot convert weights back to the weights of the checkpoint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: adapters.Adapter,
        weights: Mapping[str, Tensor],
        rounding: adapters.BitsAndBytesRounding | None,
    ) -> None:
        self._model, self._adapter, self._rounding = model, adapter, rounding
        self.parts = self._joined(weight_groups(model, weights))
        for part in self.parts:
            self._plan(part, weights)
        self.unties = any(part.copies for part in self.parts)

    @torch.no_grad()
    def compute(self, part: WeightPart, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The merged weights of a part, by their names in the checkpoint."""
        weights = {key: read(key) for key in part.keys}
        if not self._is_changed(part):
            return weights
        values = self._base_values(part, weights)
        for name, value in values.items():
            if name in self._adapter.replaced:
                values[name] = self._adapter.replaced[name].to(value.dtype, copy=True)
            elif self._rounding is not None and self._rounding.covers(name):
                values[name] = self._rounding(value)
        for layer, names in part.layers:
            adapters.merge_into(layer, names, values, self._adapter)
        for name, source in self._adapter.ties.items():
            if name in values:
                values[name] = values[source].clone()
        return self._reverted(part, values)

    def _base_values(self, part: WeightPart, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the model, by name."""
        values: dict[str, Tensor] = {}
        for group in part.groups:
            values |= convert_weights(self._model, group, weights)
        return values | {name: values[source].clone() for name, source in part.copies.items()}

    def _reverted(self, part: WeightPart, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: values[name] for name in part.copies}
        for group in part.groups:
            found |= revert_weights(self._model, group, values)
        return found

    def _plan(self, part: WeightPart, weights: Mapping[str, Tensor]) -> None:
        """Compute the part's outputs on the meta device, which shows whether the conversion can be reverted."""
        part.outputs = own = {key: weights[key] for key in part.keys}
        if not self._is_changed(part):
            return
        values = self._base_values(part, own)
        for name in values.keys() & self._adapter.replaced.keys():
            values[name] = self._adapter.replaced[name].to(device="meta", dtype=values[name].dtype)
        part.outputs = self._reverted(part, values)
        if part.outputs.keys() != {*own, *part.copies}:
            raise ModelError(
                f"transformers converts {', '.join(own)} and not back to them. Merge with PEFT's merge_and_unload."
            )

    def _is_changed(self, part: WeightPart) -> bool:
        is_rounded = self._rounding is not None and any(map(self._rounding.covers, part.names))
        return bool(part.layers or part.copies or is_rounded or self._adapter.replaced.keys() & part.names)

    def _joined(self, groups: list[WeightGroup]) -> list[WeightPart]:
        """Join groups that depend on each other, and add weights that are no longer tied."""
        parts = [WeightPart([group]) for group in groups]
        part_of = {name: part for part in parts for name in part.names}
        changed = [names for _, names in self._adapter.layers]
        for name, source in self._adapter.base_ties.items():
            if name in self._adapter.ties and name in part_of:
                changed.append([name, source])
            elif name not in self._adapter.ties and name not in part_of and source in part_of:
                part_of[source].copies[name] = source
                part_of[name] = part_of[source]
        for name in [*sum(changed, []), *self._adapter.replaced]:
            if name not in part_of and name not in self._adapter.ties:
                raise ModelError(
                    f"The base model has no weight for {name}, which the adapter changes. Give its own (--base-model)."
                )
        for first, *others in changed:
            kept = part_of[first]
            for other in (part_of[name] for name in others if part_of[name] is not kept):
                kept.groups += other.groups
                kept.copies |= other.copies
                part_of |= dict.fromkeys((*other.names, *other.copies), kept)
        for layer, names in self._adapter.layers:
            part_of[names[0]].layers.append((layer, names))
        without = [part for part in parts if not part.names]  # in the checkpoint, but not in the model
        return [*dict.fromkeys(part_of.values()), *without]


def adapter_of_run(config: RunConfig, adapter: str | None = None, base: str | None = None) -> MergeSource:
    """The adapter in the `output_dir` of a config (or in the folder `adapter`) and its base model."""
    folder = Path(adapter or config.output_dir).expanduser()
    config = as_trained(config, folder)
    return MergeSource(
        folder,
        lasting_name(base) if base else find_base_model(config),
        config.revision_of_model if base is None else None,
        config.trust_remote_code,
        tokenizer=folder,
        quantised=config if config.load_in_4bit or config.load_in_8bit else None,
        base_config=config.base_model_config,
    )


def adapter_in_folder(folder: Path, base: str | None = None) -> MergeSource:
    """The adapter in a folder and the base model that its configuration names.

    Raises ModelError if it was trained on quantised weights: only the config has the settings of the quantisation.
    """
    config = adapters.read_lora_config(folder)
    if _was_quantised(folder):
        raise ModelError(f"The adapter in {folder} was trained on quantised weights. Give the config of its run.")
    run = keys_of_base(folder)
    revision = None if base else config.revision or run.get("revision_of_model")
    with doing(f"reading the name of the base model in {folder / CONFIG} (or --base-model)"):
        base = lasting_name(base or config.base_model_name_or_path)
    return MergeSource(folder, base, revision, tokenizer=folder, base_config=run.get("base_model_config"))


def _was_quantised(folder: Path) -> bool:
    """Whether a run of `ebft train` on quantised weights saved this folder, by its card or its checkpoints."""
    for record in (folder / RUN_FILE, *folder.glob(f"checkpoint-*/{RUN_FILE}")):
        saved = read_object(record) or {}
        settings = saved | saved.get("settings", {})  # at the top in earlier versions
        if settings.get("adapter") == "qlora" or settings.get("load_in_8bit") or settings.get("load_in_4bit"):
            return True
    card = folder / "README.md"
    return card.is_file() and "QLoRA adapter" in card.read_text(encoding="utf-8", errors="replace")
