"""The parts of a merge: weights of the checkpoint that are read, changed and written together.

Most parts are one weight. A part has several if transformers converts them into one weight of the model, if one layer
of the adapter changes them all, or if they are tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.export.adapter import Adapter, merge_into
from ebft.over_transformers import WeightGroup, convert_weights, revert_weights, weight_groups


class Rounding(Protocol):
    """What happened to weights of the model before the adapter was trained on them, such as quantisation."""

    def covers(self, name: str) -> bool: ...

    def __call__(self, weight: Tensor) -> Tensor: ...


@dataclass(eq=False)
class Part:
    """Weights that are written together; `outputs` are on the meta device, by their names in the checkpoint."""

    groups: list[WeightGroup]
    layers: list[tuple[LoraLayer, list[str]]] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)  # weights that the checkpoint does not have: {name: source}
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The weights to read."""
        return [key for group in self.groups for key in group.keys]

    @property
    def names(self) -> list[str]:
        """Their names in the model."""
        return [name for group in self.groups for name in group.names]


class Merge:
    """The merge of an adapter into the weights of a checkpoint, one part at a time.

    `model` is the base model on the meta device, without adapter. Raises ModelError if the checkpoint has no weight
    that the adapter changes, or if transformers cannot convert weights back to those of the checkpoint.
    """

    def __init__(
        self, model: PreTrainedModel, adapter: Adapter, weights: Mapping[str, Tensor], rounding: Rounding | None = None
    ) -> None:
        self._model, self._adapter, self._rounding = model, adapter, rounding
        self.parts = self._joined(weight_groups(model, weights))
        for part in self.parts:
            self._plan(part, weights)
        self.unties = any(part.copies for part in self.parts)

    @torch.no_grad()
    def compute(self, part: Part, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The merged weights of a part, by their names in the checkpoint."""
        weights = {key: read(key) for key in part.keys}
        if not self._is_changed(part):
            return weights
        values, dtypes = self._base_values(part, weights)
        for name, value in values.items():
            if name in self._adapter.replaced:
                values[name] = self._adapter.replaced[name].to(dtypes[name], copy=True)
            elif self._rounding is not None and self._rounding.covers(name):
                values[name] = self._rounding(value)
        for layer, names in part.layers:
            merge_into(layer, names, values, self._adapter)
        for name, source in self._adapter.ties.items():
            if name in values:
                values[name] = values[source].clone()
        return self._reverted(part, values)

    def _base_values(
        self, part: Part, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
        """The weights of the model, by name, and their dtypes in the checkpoint."""
        values: dict[str, Tensor] = {}
        for group in part.groups:
            values |= convert_weights(self._model, group, weights)
        values |= {name: values[source].clone() for name, source in part.copies.items()}
        return values, {name: value.dtype for name, value in values.items()}

    def _reverted(self, part: Part, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: values[name] for name in part.copies}
        for group in part.groups:
            found |= revert_weights(self._model, group, values)
        return found

    def _plan(self, part: Part, weights: Mapping[str, Tensor]) -> None:
        """Compute the part's outputs on the meta device, which shows whether the conversion can be reverted."""
        own = {key: weights[key] for key in part.keys}
        if not self._is_changed(part):
            part.outputs = own
            return
        values, dtypes = self._base_values(part, own)
        for name in values.keys() & self._adapter.replaced.keys():
            values[name] = self._adapter.replaced[name].to(device="meta", dtype=dtypes[name])
        part.outputs = self._reverted(part, values)
        if part.outputs.keys() != {*own, *part.copies}:
            raise ModelError(
                f"transformers {'converts ' + ', '.join(own)} when it loads the model, and does not convert the result "
                f"back to the same names but to {', '.join(part.outputs)}, so these weights cannot be merged one shard "
                "at a time. Merge with PEFT's merge_and_unload."
            )

    def _is_changed(self, part: Part) -> bool:
        names = part.names
        is_rounded = self._rounding is not None and any(map(self._rounding.covers, names))
        return bool(part.layers or part.copies or is_rounded or self._adapter.replaced.keys() & names)

    def _joined(self, groups: list[WeightGroup]) -> list[Part]:
        """Join groups that depend on each other, and add weights that are no longer tied."""
        parts = [Part([group]) for group in groups]
        part_of = {name: part for part in parts for name in part.names}
        changed = [names for _, names in self._adapter.layers]
        for name, source in self._adapter.base_ties.items():
            if name in self._adapter.ties and name in part_of:
                changed.append([name, source])
            elif name not in self._adapter.ties and name not in part_of and source in part_of:
                part_of[source].copies[name] = source
                part_of[name] = part_of[source]
        self._check_present(part_of, [*sum(changed, []), *self._adapter.replaced])
        for names in changed:
            _join(part_of, names)
        for layer, names in self._adapter.layers:
            part_of[names[0]].layers.append((layer, names))
        without = [part for part in parts if not part.names]  # in the checkpoint, but not in the model
        return [*dict.fromkeys(part_of.values()), *without]

    def _check_present(self, part_of: Mapping[str, Part], names: Iterable[str]) -> None:
        missing = [name for name in names if name not in part_of and name not in self._adapter.ties]
        if missing:
            raise ModelError(
                f"The base model's checkpoint has no weight for {missing[0]}, which the adapter changes, so it is not "
                "the model that the adapter was trained on. Give that model (--base-model)."
            )


def _join(part_of: dict[str, Part], names: list[str]) -> None:
    kept = part_of[names[0]]
    for name in names[1:]:
        other = part_of[name]
        if other is not kept:
            kept.groups += other.groups
            kept.copies |= other.copies
            for moved in (*other.names, *other.copies):
                part_of[moved] = kept
