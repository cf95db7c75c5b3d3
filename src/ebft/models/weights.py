"""Loading weights: every tensor of the model must be in the files, with finite values; models in GGUF files, and
experts that are quantised while they are loaded."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import PartialState
from peft.tuners.lora import ParamWrapper
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_fsdp_enabled

from ebft.catalog import refuse_classifier
from ebft.config.keys.models import ROUNDED
from ebft.errors import ModelError, doing, some_of, warn
from ebft.models.causal_lm import LANGUAGE, HeadType, head_modules
from ebft.models.weight_files import WeightFiles, weight_files
from ebft.transformers_internals import TEXT_NAMES, forget_text_names, forget_title, read_gguf_metadata

if TYPE_CHECKING:
    from ebft.config.keys.models import ModelSettings, QatSection

GROUP_SIZE = 32  # weights that share a scale, with int4
SMALLEST = 1e-5  # scale of ternary weights, and of their inputs


def torchao_settings(wanted: Any, device: torch.device) -> Any:
    """The settings of torchao for linear layers, of the section `quantization` or `qat`."""
    with doing("importing torchao (pip install 'ebft[quantize]')"):
        from torchao import quantization

    kind, size = (wanted.weight_dtype, wanted.activation_dtype), wanted.group_size or GROUP_SIZE
    make: dict[tuple[str, str | None], Callable[[], Any]] = {
        ("int8", None): lambda: quantization.Int8WeightOnlyConfig(
            granularity=quantization.PerGroup(size) if wanted.group_size else quantization.PerRow()
        ),
        ("int8", "int8"): quantization.Int8DynamicActivationInt8WeightConfig,
        ("int4", None): lambda: quantization.Int4WeightOnlyConfig(
            size, int4_packing_format="tile_packed_to_4d" if device.type == "cuda" else "plain"
        ),
        ("int4", "int8"): lambda: quantization.Int8DynamicActivationIntxWeightConfig(
            torch.int4, quantization.PerGroup(size)
        ),
        ("int4", "float8_e4m3fn"): quantization.Float8DynamicActivationInt4WeightConfig,
        ("float8_e4m3fn", None): quantization.Float8WeightOnlyConfig,
        ("float8_e4m3fn", "float8_e4m3fn"): quantization.Float8DynamicActivationFloat8WeightConfig,
    }
    return make[kind]()


def quantised_layers(
    wanted: Any, model: PreTrainedModel
) -> tuple[dict[str, nn.Module], dict[str, nn.Module], int | None]:
    """The linear layers and the embeddings that are quantised, by name, and the weights of a group; not the output
    layer. Raises ModelError for layers that do not fit."""
    kind = wanted.weight_dtype, wanted.activation_dtype
    size = ROUNDED.get(kind) or wanted.group_size or (GROUP_SIZE if wanted.weight_dtype == "int4" else None)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not output
    }
    embeddings = {name: module for name, module in model.named_modules() if module is embedding}
    for name, module in (linear | embeddings if wanted.quantize_embedding else linear).items():
        if size is not None and module.weight.shape[-1] % size:
            raise ModelError(
                f"group_size: {size} does not divide the {module.weight.shape[-1]} columns of {name}. Use a smaller "
                "power of 2, or weight_dtype: int8 without group_size."
            )
    if wanted.quantize_embedding and output is not None and output.weight is embedding.weight:
        raise ModelError(
            "quantize_embedding: the embeddings are also the output layer of this model (tie_word_embeddings), which "
            "is not quantised. Remove it."
        )
    return linear, embeddings if wanted.quantize_embedding else {}, size


class TernaryLinear(nn.Linear):
    """A linear layer with `ternary` weights, and, with `rounds_inputs`, inputs in 8 bits with a scale for each token;
    gradients are as without rounding (BitNet b1.58, arXiv:2402.17764)."""

    rounds_inputs: bool

    def forward(self, input: Tensor) -> Tensor:
        if self.rounds_inputs:
            given, scale = input.detach(), input.detach().abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / 127
            # A tensor minus itself adds a gradient to rounded values, and no rounding error.
            input = (given / scale).round().clamp(-127, 127) * scale + (input - given)
        weight = self.weight.detach()
        return F.linear(input, ternary(weight) + (self.weight - weight), self.bias)


def ternary(weight: Tensor) -> Tensor:
    """The weights (O, I) as -1, 0 and 1 times the mean magnitude of each row."""
    scale = weight.abs().mean(-1, keepdim=True).clamp_min(SMALLEST)
    return (weight / scale).round().clamp(-1, 1) * scale


def prepare_rounding(model: PreTrainedModel, wanted: QatSection) -> None:
    """Give the layers that `ebft quantize` quantises a forward pass that rounds as it does, with the gradient of a pass
    that does not. It is off until `round_weights`; copies of the model keep it off. Layers with a forward pass of their
    own, such as routers, are left as they are. Raises ModelError for a model or a machine without such layers."""
    with doing("importing torchao (pip install 'ebft[quantize]')"):
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    linear, embeddings, size = quantised_layers(wanted, model)
    of_groups = {"granularity": "per_channel"} if size is None else {"group_size": size}
    of_integers = partial(IntxFakeQuantizeConfig, getattr(torch, wanted.weight_dtype, torch.int8), **of_groups)
    problem = None if any(type(layer) is nn.Linear for layer in linear.values()) else "finds no linear layers"
    if any(type(layer) is not nn.Embedding for layer in embeddings.values()):
        problem = "cannot round embeddings that are scaled, so remove quantize_embedding"
    if wanted.weight_dtype == "nvfp4" and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10):
        problem = "with nvfp4 needs a GPU of compute capability 10 (Blackwell), so set mxfp4 or int4"
    if problem:
        raise ModelError(f"qat {problem}.")
    if wanted.weight_dtype in ("mxfp4", "nvfp4"):
        from torchao.prototype import qat

        kind = partial(qat.MXFakeQuantizeConfig, torch.float4_e2m1fn_x2, block_size=size)
        both = (kind if wanted.weight_dtype == "mxfp4" else qat.NVFP4FakeQuantizeConfig)()
        settings = QATConfig(weight_config=both, activation_config=both)
    elif wanted.weight_dtype == "ternary" or (wanted.weight_dtype, wanted.activation_dtype) == ("int8", None):
        settings = QATConfig(weight_config=of_integers())
    else:
        settings = QATConfig(torchao_settings(wanted, torch.device("cpu")))
    plain = [name for name, layer in linear.items() if type(layer) is nn.Linear]
    if wanted.weight_dtype == "ternary":
        for name in plain:
            vars(linear[name])["rounds_inputs"] = wanted.activation_dtype == "int8"
            linear[name].__class__ = TernaryLinear
    else:
        quantize_(model, settings, lambda module, name: name in plain)
    if embeddings:
        quantize_(model, QATConfig(weight_config=of_integers()), lambda module, name: name in embeddings)
    suspend_rounding(model)


def prepare_float8(model: PreTrainedModel) -> None:
    """Give linear layers, except the output layer, products in float8 with a scale for each tensor, in both directions.
    They are off until `round_weights`; copies of the model keep them off. Raises ModelError if no layer has them."""
    with doing("importing torchao (pip install 'ebft[quantize]')"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    output = model.get_output_embeddings()
    fits = lambda module, _: (
        type(module) is nn.Linear and module is not output and not any(size % 16 for size in module.weight.shape)
    )
    # Numbers of tokens that 16 does not divide are padded.
    convert_to_float8_training(model, config=Float8LinearConfig(pad_inner_dim=True), module_filter_fn=fits)
    if not suspend_rounding(model):
        raise ModelError("fp8 finds no linear layers whose sizes 16 divides. Remove it.")


def suspend_rounding(model: nn.Module) -> bool:
    """Give layers that round the class that they had before, until `round_weights`; whether there are any."""
    found = False
    for module in model.modules():
        rounds = type(module).__module__.startswith("torchao.") or isinstance(module, TernaryLinear)
        if isinstance(module, (nn.Linear, nn.Embedding)) and rounds:
            found = True
            plain = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
            vars(module)["rounding"], module.__class__ = type(module), plain
    return found


def round_weights(model: nn.Module) -> None:
    """Let the layers that `prepare_rounding` has prepared round from now on."""
    for module in model.modules():
        module.__class__ = vars(module).get("rounding", type(module))


def quantise_experts(model: nn.Module, settings: ModelSettings) -> int:
    """Quantise the frozen fused experts of a model in place, to as many bits as linear layers; return their number. To
    be called with the adapter attached: PEFT takes the shapes of experts when it adapts them."""
    # PEFT adds to a parameter before its module runs, in wrappers around it; the outermost is first.
    outermost: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            outermost.setdefault(id(module.get_base_layer()), module)
    count = 0
    for module in list(model.modules()):
        unpack: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, weight in list(module.named_parameters(recurse=False)):
            stacks_experts = weight.dim() == 3 and weight.is_floating_point() and not isinstance(module, nn.Conv1d)
            if not stacks_experts or weight.requires_grad or weight.shape[-1] % 2:
                continue
            stored, unpack[name] = packed(weight.data, settings)
            _replace(module, name, stored.view(*weight.shape[:-1], -1))
        if unpack:
            _UnpackedWhileRunning(module, unpack, outermost.get(id(module), module))
            count += len(unpack)
    return count


def packed(weight: Tensor, settings: ModelSettings) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A weight in 4 or 8 bits, as bitsandbytes stores linear layers, and what restores it."""
    if settings.load_in_4bit:
        found, state = functional().quantize_4bit(weight, **settings.bnb_config_kwargs.four_bit)

        def from_four_bits(packed: Tensor) -> Tensor:
            if state.absmax.device != packed.device:
                state.to(packed.device)
            return functional().dequantize_4bit(packed.view(-1, 1), state)

        return found, from_four_bits
    found, scale, _ = functional().int8_vectorwise_quant(weight.flatten(0, -2).half())
    dtype = weight.dtype  # not the weight, which would stay in memory

    def from_eight_bits(packed: Tensor) -> Tensor:
        whole = functional().int8_vectorwise_dequant(packed.flatten(0, -2), scale.to(packed.device))
        return whole.view(packed.shape).to(dtype)

    return found, from_eight_bits


def functional() -> Any:
    with doing("importing bitsandbytes (pip install 'ebft[qlora]')"):
        from bitsandbytes import functional

    return functional


def unpacked_size(weight: Tensor) -> int:
    """The number of elements that a weight stands for."""
    return weight.nbytes * 2 if is_packed(weight) else weight.numel()


def is_packed(weight: Tensor) -> bool:
    """Whether a weight has 4 bits per element, two in each byte."""
    return type(weight).__name__ == "Params4bit" or weight.dtype == torch.uint8


class _UnpackedWhileRunning:
    """Replaces packed weights of a module by whole ones during the passes of a module around it."""

    def __init__(self, module: nn.Module, unpack: Mapping[str, Callable[[Tensor], Tensor]], around: nn.Module) -> None:
        self._module, self._unpack, self._kept = module, unpack, dict[str, Tensor]()
        around.register_forward_pre_hook(self.before)
        around.register_forward_hook(self.after, always_call=True)

    def before(self, *call: Any) -> None:
        for name, whole in self._unpack.items():
            self._kept[name] = getattr(self._module, name).data
            _replace(self._module, name, whole(self._kept[name]))

    def after(self, *call: Any) -> None:
        for name in list(self._kept):  # fewer if `before` failed
            _replace(self._module, name, self._kept.pop(name))


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, requires_grad=False))


_TEXT = re.compile("|".join(TEXT_NAMES))
_UNTIED = "so we will NOT tie them"  # in a warning of transformers


def load_complete(
    name: str, head: HeadType = LANGUAGE, *, may_lack_head: bool = False, **options: Any
) -> PreTrainedModel:
    """The model `name`, with every tensor from its weight files; `options` are passed to `from_pretrained`. With
    `may_lack_head`, weights without the head of a classifier are accepted: it starts from random values. Raises
    ModelError for other tensors that are missing or have another shape. Tensors that the model does not have give a
    warning, unless they are the head that is replaced. With the configuration of the text model of a multimodal one,
    its text model is loaded alone."""
    if head is LANGUAGE:
        refuse_classifier(Path(name))
    stored: dict[str, Tensor] = {}
    if "gguf_file" not in options:
        stored = WeightFiles(weight_files(Path(name))).weights
    # Quantised tensors have other shapes until they are converted.
    reports = options.get("quantization_config") is None
    with _without_report() as reported:
        model, found = head.auto_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=reports, key_mapping=TEXT_NAMES, **options
        )
    if forget_text_names(model):
        others = {key for key in found["unexpected_keys"] if not _TEXT.search(key)}
        found["unexpected_keys"] -= others
        stored = {own_name(key): tensor for key, tensor in stored.items() if key not in others}
        warn(
            f"{name}: the text model of a multimodal model is loaded, {type(model).__name__}, without {len(others)} "
            "tensors of its other parts."
        )
    sizes = [f"{key} ({tuple(given)} instead of {tuple(own)})" for key, given, own in found["mismatched_keys"]]
    if sizes:
        raise ModelError(f"the weights of {name} do not have the shapes of the model: {some_of(sizes)}")
    own = tuple(f"{module}." for module in head_modules(model))
    starts_head = may_lack_head and any(key.startswith(own) for key in found["missing_keys"])
    if starts_head:
        inside = model.base_model_prefix + "."
        found["missing_keys"] = {key for key in found["missing_keys"] if not key.startswith(own)}
        found["unexpected_keys"] = {key for key in found["unexpected_keys"] if key.startswith(inside)}
    if found["missing_keys"]:
        unused = f" The weights have instead {some_of(found['unexpected_keys'])}." if found["unexpected_keys"] else ""
        raise ModelError(
            f"the weights lack {some_of(found['missing_keys'])}, which would start from random values.{unused} Use "
            "complete weights, or correct config.json"
        )
    if found["unexpected_keys"]:
        count = len(found["unexpected_keys"])
        warn(
            f"{name}: the weights contain {count} tensor{'s' * (count > 1)} that {type(model).__name__} with this "
            f"config.json does not use: {some_of(found['unexpected_keys'])}."
        )
    for problem in _unusable(model, stored):
        raise ModelError(f"{problem}. Use another model, or correct its files")
    if any(_UNTIED in message for message in reported):
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        warn(
            f"{name}: config.json has tie_word_embeddings: true, but the weights contain an output layer that differs "
            "from the embeddings. Both are used, and the trained model is saved with tie_word_embeddings: false. "
            "Servers such as vLLM may use the embeddings for both: set it to false in config.json."
        )
    if is_fsdp_enabled() and not PartialState().is_local_main_process:
        _free_weights(model)
    return model


def _free_weights(model: PreTrainedModel) -> None:
    """Replace the weights of a model, which FSDP receives from the first process, by zeros that share one element."""
    for name, own in [*model.named_parameters()]:
        if own.is_meta:  # of a new head: accelerate tells parameters apart by their addresses
            parent, _, leaf = name.rpartition(".")
            zeros = torch.zeros((), dtype=own.dtype).expand(own.shape)
            setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(zeros, own.requires_grad))
        elif _is_plain(own):
            own.data = own.new_zeros(()).expand(own.shape)


def own_name(key: str) -> str:
    """The name that a weight of a checkpoint has in the text model alone."""
    for pattern, own in TEXT_NAMES.items():
        key = re.sub(pattern, own, key)
    return key


@torch.no_grad()
def _unusable(model: PreTrainedModel, stored: dict[str, Tensor]) -> Iterator[str]:
    """Quantised weights that would be read as plain numbers, and values with which no model computes anything."""
    settings = getattr(model.config, "quantization_config", None)  # absent in most models
    if settings is not None and getattr(model, "quantization_method", None) is None:  # which transformers sets
        yield (
            f"quantization_config of config.json: transformers does not know the method of {settings!r:.200}, and "
            "would read the weights as if they were not quantised"
        )
    plain = {key for key, own in model.named_parameters() if own.is_floating_point()} & stored.keys()
    modules = {key.rpartition(".")[0] for key in stored if "scale" in key.rpartition(".")[2]}
    packed = [
        key
        for key in plain
        if not stored[key].dtype.is_floating_point
        or (stored[key].dtype.itemsize == 1 and key.rpartition(".")[0] in modules)
    ]
    if packed and settings is None:
        yield (
            f"{len(packed)} weights are stored as {stored[min(packed)].dtype} ({some_of(packed)}), but config.json has "
            "no quantization_config, so their scales would not be applied"
        )
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true":
        return  # only one process has the weights
    embeddings = model.get_input_embeddings().weight
    for key, own in model.named_parameters():
        if not _is_plain(own):
            continue
        low, high = own.aminmax()  # without a copy; both are NaN if a value is
        if not (low.isfinite() and high.isfinite()):
            yield f"the weights contain NaN or infinite values ({key})"
        if own is embeddings and low == high and own.dim() == 2 and len(own) > 1:  # of one dimension: partitioned
            yield f"the embeddings of all tokens are equal ({low:.4g})"


def _is_plain(own: Tensor) -> bool:
    """Whether values can be compared: the tensor is whole and not quantised."""
    is_number = type(own.data) is Tensor and own.is_floating_point() and own.dtype.itemsize > 1 and not is_packed(own)
    return is_number and not own.is_meta and own.dim() > 0 and own.numel() > 0


@contextmanager
def _without_report() -> Iterator[list[str]]:
    """Context manager without what transformers logs about tensors, which is reported here; yields these messages."""
    reported: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message and _UNTIED not in message:
            return True
        reported.append(message)
        return False

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield reported
    finally:
        logger.removeFilter(keep)


# Values of `tokenizer.ggml.pre` for GPT-2's pre-tokenisation, and for the same with individual digits.
_LIKE_GPT2 = {"gpt-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "phi-2", "roberta-bpe"}
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def load_gguf_config(name: str) -> Any:
    """The transformers configuration in the GGUF file `name`."""
    folder, file = _place(name)
    with doing(f"reading {name}"):
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=file)
    forget_title(config)
    return config


def load_gguf_model(name: str, **options: Any) -> PreTrainedModel:
    """The dense model in the GGUF file `name`: exactly the file's weights, rounded to the `dtype` of `options`."""
    options.setdefault("config", load_gguf_config(name))
    # By default, transformers may keep the blocks quantised, which can be neither trained nor saved.
    dense = transformers.GgufConfig(dequantize=True)
    folder, file = _place(name)
    with doing(f"reading {name}"):
        model = load_complete(folder, gguf_file=file, quantization_config=dense, **options)
    model.config.name_or_path = model.name_or_path = name
    # When saving an adapter, PEFT looks for a config.json of the base model to check whether the vocabulary grew.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf", category=UserWarning)
    return model


def load_gguf_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the GGUF file `name`, including its chat template. It has exactly the file's tokens, and splits
    text and adds a beginning-of-sequence token as the file specifies."""
    with doing(f"reading {name}"), TemporaryDirectory() as alone:
        # transformers prefers a tokenizer.json in the same folder, which may be of another model.
        link = Path(alone) / Path(name).name
        link.symlink_to(Path(name).absolute())
        loaded = transformers.AutoTokenizer.from_pretrained(alone, gguf_file=str(link))
        metadata, _ = read_gguf_metadata(name)
    backend = json.loads(loaded.backend_tokenizer.to_str())
    # transformers adds GPT-2's <|endoftext|> to every byte-level vocabulary, even if the model does not have it.
    count = metadata["tokenizer.ggml.tokens"]
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["id"] < count]
    # transformers splits like GPT-2 where it does not know the pre-tokenizer with which merges were learned.
    used, kind = backend["pre_tokenizer"], metadata.get("tokenizer.ggml.pre")
    if used is not None and used["type"] == "ByteLevel" and kind in _SINGLE_DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, used]}
    elif used is not None and used["type"] == "ByteLevel" and kind not in (None, *_LIKE_GPT2):
        warn(f"{name}: the pre-tokenizer {kind!r} is not supported: tokens may differ; set tokenizer_config.")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=loaded.chat_template,
        **{key: token for key, token in loaded.special_tokens_map.items() if key.endswith("_token")},
        **({} if adds_bos is None else {"add_bos_token": adds_bos}),
    )


def _place(name: str) -> tuple[str, str]:
    """The folder and the absolute path of a GGUF file: a bare name would first be looked up in the current folder."""
    path = Path(name).absolute()
    return str(path.parent), str(path)
