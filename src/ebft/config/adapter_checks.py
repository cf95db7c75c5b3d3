"""Contradictions between the keys of adapters and of the parameters that are trained."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_ROWS = re.compile(r"\[\d*:\d*\]$")  # of a parameter, at the end of a name


def adapter_problems(config: "RunConfig") -> Iterator[str]:
    """What contradicts `adapter` and the keys that describe it."""
    if config.adapter is None or config.lora_model_dir is not None:
        return
    for key in ("lora_r", "lora_alpha"):
        if getattr(config, key) is None:
            example = "lora_r: 16 with lora_alpha: 32"
            yield f"adapter: {config.adapter} needs {key}. Set it, for example {example}."
    if config.lora_target_linear and isinstance(config.lora_target_modules, str):
        yield (
            "lora_target_linear: true selects every linear layer, but lora_target_modules is also set, to a regular "
            "expression. Keep one."
        )
    elif not config.lora_target_linear and config.lora_target_modules is None and config.lora_target_parameters is None:
        yield (
            f"adapter: {config.adapter} needs target modules. Set lora_target_linear: true, or list them in "
            "lora_target_modules."
        )
    yield from _layers(config)
    yield from _dora(config)
    yield from _parameters(config)


def _layers(config: "RunConfig") -> Iterator[str]:
    if config.peft_layers_pattern is not None and config.peft_layers_to_transform is None:
        yield "peft_layers_pattern has no effect without peft_layers_to_transform. Set it, or remove the pattern."
    if config.peft_layers_to_transform is not None and isinstance(config.lora_target_modules, str):
        yield (
            "peft_layers_to_transform is not supported with a regular expression in lora_target_modules. Select the "
            "layers in the expression, or list the modules."
        )
    if config.peft_init_lora_weights == "orthogonal" and config.lora_r is not None and config.lora_r % 2:
        yield f"peft_init_lora_weights: orthogonal requires an even lora_r, not {config.lora_r}. Change one of them."


def _dora(config: "RunConfig") -> Iterator[str]:
    if config.peft_use_dora and _uses_vllm(config):
        yield "peft_use_dora: true is not supported with trl.use_vllm: vLLM does not load DoRA adapters. Remove one."


def _parameters(config: "RunConfig") -> Iterator[str]:
    if config.lora_target_parameters is not None:
        yield from expert_problems(config, "lora_target_parameters")


def expert_problems(config: "RunConfig", key: str) -> Iterator[str]:
    """What contradicts adapters of fused experts, which `key` selects.

    PEFT replaces adapted parameters during the forward pass of their module.
    """
    changes = "adapted parameters are replaced as a whole during the forward pass"
    excluded = {
        f"lora_dropout: {config.lora_dropout:g}": (config.lora_dropout > 0, "the adapter has no input of its own"),
        "peft_use_dora: true": (config.peft_use_dora, "PEFT has no DoRA for them"),
        "peft_layers_to_transform": (
            config.peft_layers_to_transform is not None,
            "PEFT restricts modules only; name the layers, such as layers.1.mlp.experts.down_proj",
        ),
        "peft_init_lora_weights: orthogonal": (config.peft_init_lora_weights == "orthogonal", "experts are stacked"),
        "load_in_4bit": (config.load_in_4bit, "they must be dense"),
        "load_in_8bit": (config.load_in_8bit, "they must be dense"),
        "fsdp": (bool(config.fsdp or config.fsdp_config), changes),
        "deepspeed": (config.deepspeed is not None, changes),
        "trl.use_vllm": (_uses_vllm(config), "vLLM does not load such adapters"),
    }
    for other, (given, reason) in excluded.items():
        if given:
            yield f"{key} is not supported with {other}: {reason}. Remove one of them."


def unfrozen_problems(config: "RunConfig") -> Iterator[str]:
    """What contradicts `unfrozen_parameters`."""
    if config.unfrozen_parameters is None:
        return
    if config.adapter is not None:
        yield (
            "unfrozen_parameters selects the parameters of full fine-tuning, but adapter is set. Remove one of them; "
            "lora_modules_to_save trains modules in addition to an adapter."
        )
    for pattern in config.unfrozen_parameters:
        if _ROWS.search(pattern):
            yield (
                f"unfrozen_parameters: {pattern!r} selects rows of a parameter, but parameters are trained as a whole. "
                "Remove the range."
            )
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"unfrozen_parameters: {pattern!r} is not a valid regular expression: {error}."


def _uses_vllm(config: "RunConfig") -> bool:
    return config.method.rows == "prompts" and config.trl.use_vllm
