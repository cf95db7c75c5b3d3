"""Which modules and parameters of a model an adapter changes: linear layers, fused experts, no routers.

transformers stacks the experts of many models in parameters such as `experts.gate_up_proj`. For some of these models,
PEFT takes the names that the experts had as modules (`gate_proj`, `up_proj`, `down_proj`; `w1`, `w2`, `w3`) for those
parameters, in all layers. It then adapts no linear layer of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PreTrainedModel

from ebft.errors import ModelError, shortened, warn
from ebft.transformers_internals import Conv1D

if TYPE_CHECKING:
    from ebft.config.keys.models import ModelSettings

_LINEAR = (torch.nn.Linear, Conv1D)
_ROUTERS = ("gate", "router")
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # types of models in which PEFT refuses this:
_OF_KERNELS = ".out_proj"
_PARTS_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def target_modules(model: PreTrainedModel, config: ModelSettings) -> str | list[str]:
    """What `lora_target_modules` and `lora_target_linear` select, for PEFT. Raises ModelError for an element that
    selects nothing, or that PEFT would take for something else."""
    wanted = config.lora_target_modules
    if config.lora_target_linear:
        return _all_linear_and(model, config, wanted if isinstance(wanted, list) else [])
    others = config.lora_target_linear_modules, config.lora_target_parameters
    # With lora_target_parameters alone, none: with None, PEFT would choose modules by the model's type.
    selected = [] if wanted is None else _selected(model, wanted, is_alone=not any(others))
    if config.lora_target_linear_modules is None:
        return selected
    return [*selected, *_linear_layers(model, config.lora_target_linear_modules)]


def _selected(model: PreTrainedModel, wanted: str | list[str], is_alone: bool) -> str | list[str]:
    """What `lora_target_modules` selects; `is_alone`: no other key selects anything. Where PEFT takes names for fused
    experts, it takes the last parts of an expression only, and experts of all layers."""
    parts, stacks = names_of_experts(model), _stacks(model)
    selected = _present(model, wanted, parts, is_alone)
    found = list(dict.fromkeys(name for names in selected.values() for name in names))
    if not parts:
        is_one = isinstance(wanted, str) and not all(re.fullmatch(wanted, name) for name in found)
        return found if is_one else wanted if isinstance(wanted, str) else list(selected)
    in_stacks = [{part for part in parts if f"{stack}.{part}" in found} for stack in stacks]
    chosen = sorted(set().union(*in_stacks))
    modules = [name for name in found if name.rpartition(".")[0] not in stacks]
    skipped = [name for name in modules if name.rpartition(".")[2] in parts]
    if any(names != {*chosen} for names in in_stacks) or (skipped == modules and skipped and not chosen and is_alone):
        raise ModelError(_of_all_layers(model, shortened(wanted, 200)))
    _warn_of_skipped("lora_target_modules", parts, [*skipped, *_linear_like(model, chosen)])
    if isinstance(wanted, str):
        return [*(name for name in modules if name not in skipped), *chosen]
    return [given for given, names in selected.items() if not {*names} <= {*skipped}]


def _present(model: PreTrainedModel, wanted: str | list[str], parts: list[str], is_alone: bool) -> dict[str, list[str]]:
    """The elements of `lora_target_modules` that select something, with the names; the others are in a warning. Raises
    ModelError if none does and the list `is_alone`."""
    elements = [wanted] if isinstance(wanted, str) else wanted
    selected = {given: _matching(model, given, isinstance(wanted, str), parts) for given in elements}
    missing = [given for given, names in selected.items() if not names]
    if missing:
        names = ", ".join(map(repr, missing))
        unmatched = f"lora_target_modules: {names} matches no module. The linear layers are {_last_parts(model)}"
        if (is_alone or isinstance(wanted, str)) and len(missing) == len(elements):
            experts = _short(fused_experts(model))
            fused = f". The fused experts are adapted with lora_target_parameters: {experts}" if experts else ""
            raise ModelError(f"{unmatched}{fused}.")
        warn(f"{unmatched}. The other modules are adapted.")
    return {given: names for given, names in selected.items() if names}


def _linear_layers(model: PreTrainedModel, expressions: list[str]) -> list[str]:
    """The names of the linear layers that `lora_target_linear_modules` selects. An expression may also name them as in
    a multimodal model, whose text model is trained alone."""
    names = _linear(model)
    aliases = in_whole_models(names)
    key, chosen = "lora_target_linear_modules", dict[str, None]()
    for expression in expressions:
        found = [alias for alias in aliases if re.fullmatch(rf"(.*\.)?(?:{expression})", alias)]
        if not found:
            raise ModelError(f"{key}: {expression!r} matches no linear layer; they end with {_last_parts(model)}.")
        chosen |= dict.fromkeys(aliases[alias] for alias in found)
    parts = names_of_experts(model)
    for name in chosen:
        if name.rpartition(".")[2] in parts:
            raise ModelError(_of_all_layers(model, name).replace("lora_target_modules", key, 1))
    return list(chosen)


def in_whole_models(names: Iterable[str]) -> dict[str, str]:
    """The `names`, and other names that they have in a multimodal model, each with the name in its text model."""
    whole = lambda name: (f"language_model.{name}", re.sub(r"^model\.", "model.language_model.", name), name)
    return {alias: name for name in names for alias in whole(name)}


def excludes_names(expression: str) -> bool:
    """Whether a regular expression says what a name is not, which is true of most other names of the same thing."""
    return "(?!" in expression or "(?<!" in expression


def _linear(model: PreTrainedModel) -> list[str]:
    """The names of all linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, _LINEAR)]


def _last_parts(model: PreTrainedModel) -> str:
    """Last parts of the names of all linear layers, such as q_proj and down_proj, for messages."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in _linear(model)}))


def fused_experts(model: torch.nn.Module) -> list[str]:
    """The names of the parameters that stack experts, which have three dimensions."""
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if not isinstance(module, torch.nn.Conv1d)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]


def names_of_experts(model: PreTrainedModel) -> list[str]:
    """The names that PEFT takes for the fused experts of this model, such as gate_proj; none for most models."""
    probe = LoraConfig(target_modules=list(_PARTS_OF_EXPERTS))
    convert_peft_config_for_transformers(probe, model, None)
    return [name for name in _PARTS_OF_EXPERTS if name not in probe.target_modules]


def adapted_routers(model: PreTrainedModel, config: ModelSettings) -> list[str]:
    """The linear layers that choose the experts of a token, without those that `lora_target_modules` lists."""
    routers = [
        f"{name}.{child}"
        for name, module in model.named_modules()
        for child, own in module.named_children()
        if child in _ROUTERS and (hasattr(module, "experts") or any(map(fused_experts, module.children())))
    ]
    wanted = config.lora_target_modules if isinstance(config.lora_target_modules, list) else []
    return [
        name
        for name in _linear(model)
        if any(name == router or name.startswith(f"{router}.") for router in routers)
        and not any(name == given or name.endswith(f".{given}") for given in wanted)
    ]


def excluded_from_linear(model: PreTrainedModel, config: ModelSettings) -> list[str]:
    """What `lora_target_linear: true` does not adapt, for PEFT: routers, and what PEFT refuses, with a warning."""
    kind = model.config.model_type
    refused = [name for name, _ in model.named_modules() if name.endswith(_OF_KERNELS) and kind in _MAMBA]
    if refused:
        warn(
            f"lora_target_linear: true: the {len(refused)} layers {_OF_KERNELS[1:]} are not adapted, since PEFT "
            f"refuses them in models of the type {kind}, whose kernels read their weights directly. The other linear "
            "layers are adapted."
        )
    return [*adapted_routers(model, config), *refused]


def target_parameters(model: PreTrainedModel, wanted: list[str] | None) -> list[str] | None:
    """The suffixes of `lora_target_parameters`. PEFT only warns of one that matches nothing."""
    linear = {f"{name}.weight" for name in _linear(model)}
    names = {name: parameter.dim() for name, parameter in model.named_parameters() if name not in linear}
    for given in wanted or []:
        matching = [dims for name, dims in names.items() if name == given or name.endswith(f".{given}")]
        if not matching or not {*matching} <= {2, 3}:
            experts = _short(fused_experts(model))
            known = f"The fused experts are {', '.join(experts)}" if experts else "The model has no fused experts"
            problem = "matches no parameter outside of linear layers" if not matching else "matches a vector"
            raise ModelError(f"lora_target_parameters: {given!r} {problem}. {known}.")
    return wanted


def _all_linear_and(model: PreTrainedModel, config: ModelSettings, wanted: list[str]) -> str | list[str]:
    """All linear layers except the output layer and routers, and `wanted`, which may name fused experts. PEFT takes the
    names of some models' experts for the experts only, so that linear layers of these names are left."""
    output, routers, parts = model.get_output_embeddings(), adapted_routers(model, config), names_of_experts(model)
    others = [name for name in _linear(model) if model.get_submodule(name) is not output and name not in routers]
    linear = {name.rpartition(".")[2] for name in others}
    others = [
        given
        for given, names in _present(model, wanted, parts, is_alone=False).items()
        if given in parts or any(name.rpartition(".")[2] not in linear for name in names)
    ]
    _warn_of_skipped("lora_target_linear: true", parts, _linear_like(model, parts))
    if not parts and not others and config.peft_layers_to_transform is None:
        return "all-linear"
    return [*sorted(linear.difference(parts)), *others]


def _linear_like(model: PreTrainedModel, parts: Iterable[str]) -> list[str]:
    """The names of linear layers whose last part is the name of experts."""
    return [name for name in _linear(model) if name.rpartition(".")[2] in parts]


def _warn_of_skipped(key: str, parts: list[str], skipped: list[str]) -> None:
    """Warn of linear layers that have the name of experts and are not adapted."""
    if skipped:
        taken = [part for part in parts if part in {name.rpartition(".")[2] for name in skipped}]
        warn(
            f"{key}: in this model, PEFT takes the names {', '.join(taken)} for the fused experts, and for no linear "
            f"layers: {shortened(', '.join(_short(skipped)), 200)} are not adapted."
        )


def _stacks(model: PreTrainedModel) -> list[str]:
    """The names of the modules that contain fused experts."""
    return sorted({name.rpartition(".")[0] for name in fused_experts(model)})


def _of_all_layers(model: PreTrainedModel, given: str) -> str:
    return (
        f"lora_target_modules: {given!r} selects some of the layers that have this name, but PEFT would adapt the "
        f"fused experts of all layers of this model instead. Name the experts in lora_target_parameters: "
        f"{shortened(', '.join(fused_experts(model)), 200)}."
    )


def _matching(model: PreTrainedModel, given: str, is_expression: bool, parts: Sequence[str] = ()) -> list[str]:
    """The names of the modules, and of the `parts` of experts, that an element of `lora_target_modules` selects. An
    expression may also name them as in a multimodal model, whose text model is trained alone."""
    # PEFT treats a string as one regular expression, and the elements of a list as suffixes of names.
    pattern = given if is_expression else rf"(.*\.)?{re.escape(given)}"
    names = [
        *(name for name, _ in model.named_modules()),
        *(f"{name}.{part}" for name in _stacks(model) for part in parts),
    ]
    found = [name for name in names if re.fullmatch(pattern, name)]
    if not is_expression or (found and excludes_names(given)):
        return found
    others = (name for alias, name in in_whole_models(names).items() if re.fullmatch(pattern, alias))
    return list(dict.fromkeys((*found, *others)))


def _short(names: list[str]) -> list[str]:
    """The last two parts of `names`, each once."""
    return sorted({".".join(name.split(".")[-2:]) for name in names})
