"""Config keys of the base model, its tokenizer, attention and adapter, and of sharding it."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ebft.config.section import NotBlank, Section, paths
from ebft.errors import warn

Layer = Annotated[int, Field(ge=0, le=100_000)]
ALL_LINEAR = "all-linear"  # in PEFT


class SpecialTokens(Section):
    """The section `special_tokens:`."""

    pad_token: str | None = Field(None, min_length=1, description="Padding token.")
    eos_token: str | None = Field(None, min_length=1, description="End-of-sequence token.")
    bos_token: str | None = Field(None, min_length=1, description="Beginning-of-sequence token.")
    unk_token: str | None = Field(None, min_length=1, description="Token for out-of-vocabulary text.")
    additional_special_tokens: list[NotBlank] | None = None
    """Further special tokens; those that are not in the vocabulary are added."""


class ConfigOverrides(Section):
    """The section `overrides_of_model_config:`."""

    output_router_logits: bool | None = None
    """Add the load-balancing loss of a mixture of experts to the cross-entropy of SFT."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss."""


class BitsAndBytesKeys(Section):
    """The section `bnb_config_kwargs:`."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="Data type of 4-bit weights.")
    bnb_4bit_use_double_quant: bool = Field(True, description="Also quantise the scales of 4-bit weights.")
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of products with 4-bit weights. If unset, that of other weights (torch_dtype, bf16)."""
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    """dtype of the tensors that the 4-bit weights of linear layers are packed into."""
    blocksize: Literal[64] = 64
    """Number of 4-bit weights with the same scale; transformers has no setting for another one."""
    llm_int8_threshold: float = Field(6.0, ge=0)
    """Magnitude of inputs above which their products with 8-bit weights are in 16 bits."""
    llm_int8_has_fp16_weight: Literal[False] = Field(False, description="No effect: the base weights are not trained.")
    load_in_4bit: Literal[True] | None = Field(None, description="Accepted with load_in_4bit: true of the config.")
    load_in_8bit: Literal[True] | None = Field(None, description="Accepted with load_in_8bit: true of the config.")

    @property
    def four_bit(self) -> dict[str, Any]:
        """Arguments of bitsandbytes' `quantize_4bit` that determine the values."""
        return {"quant_type": self.bnb_4bit_quant_type, "compress_statistics": self.bnb_4bit_use_double_quant}


# dtypes of weights and of inputs that torchao can round during training -> size of groups of weights, if it is fixed.
ROUNDED = {("int8", None): None, ("int4", None): None, ("int4", "int8"): None, ("int4", "float8_e4m3fn"): 128}
ROUNDED |= {("float8_e4m3fn", "float8_e4m3fn"): None, ("mxfp4", "mxfp4"): 32, ("nvfp4", "nvfp4"): 16}
ROUNDED |= {("ternary", None): None, ("ternary", "int8"): None}


class QatSection(Section):
    """The section `qat:`."""

    weight_dtype: Literal["int8", "int4", "float8_e4m3fn", "ternary", "mxfp4", "nvfp4"] = "int8"
    """dtype that weights of linear layers are rounded to; ternary: -1, 0 and 1 times the mean magnitude of an output's
    weights. nvfp4 needs a GPU of compute capability 10 (Blackwell). ebft quantize quantises to the first four."""
    activation_dtype: Literal["int8", "float8_e4m3fn", "mxfp4", "nvfp4"] | None = None
    """dtype that inputs of linear layers are rounded to: int8 with int4 or ternary, float8_e4m3fn with int4 or itself,
    mxfp4 and nvfp4 with themselves. If unset, inputs are not rounded."""
    group_size: Annotated[int, Field(ge=2)] | None = None
    """Number of weights with the same scale, for int8 and int4. If unset, 32 for int4, and one row for int8."""
    quantize_embedding: bool = Field(False, description="Also round embeddings, with weight_dtype: int8 or int4.")
    fake_quant_after_n_steps: int | None = Field(None, ge=0, description="Number of first steps without rounding.")


class ModelKeys(Section):
    """Base model and tokenizer."""

    base_model: NotBlank
    """Model to fine-tune: a folder, a model listed by `ebft fetch`, or a Hub id."""
    gguf_file: NotBlank | None = None
    """GGUF file in the folder base_model from which the model (as dense weights) and its tokenizer are loaded."""
    base_model_config: NotBlank | None = None
    """Folder or Hub id of the model configuration. If unset, base_model."""
    revision_of_model: str | None = Field(None, description="Hub revision of the model and its tokenizer.")
    tokenizer_config: NotBlank | None = None
    """Folder or Hub id of the tokenizer. If unset, base_model."""
    trust_remote_code: bool = Field(False, description="Allow running custom code from the model's repository.")
    special_tokens: SpecialTokens = Field(default_factory=SpecialTokens)
    """Special tokens that override those of the tokenizer."""
    tokens: list[NotBlank] | None = None
    """Tokens to add to the vocabulary; new embeddings are appended to the model's."""
    added_tokens_overrides: dict[Annotated[int, Field(ge=0, lt=2**31)], NotBlank] | None = None
    """Other texts for tokens that the tokenizer reserves, by id: the embeddings keep their number. Tokens that are
    special stay special."""
    resize_token_embeddings_to_32x: bool = False
    """Resize the embeddings to a multiple of 32, at least the size of the vocabulary."""
    shrink_embeddings: bool = False
    """Also resize the embeddings if the model has more than the tokenizer has tokens."""
    mean_resizing_embeddings: bool = True
    """Draw new embeddings from a distribution around the mean of the others; false: as the model is initialised."""
    overrides_of_model_config: ConfigOverrides = Field(default_factory=ConfigOverrides)
    """Settings of the router of a mixture of experts."""
    chat_template_jinja: str | None = Field(None, min_length=1)
    """Text of the chat template, for chat_template: jinja (or unset)."""
    chat_template: str | None = None
    """Chat template: a known name (chatml, llama3, qwen3, gemma, ...), tokenizer_default,
    tokenizer_default_fallback_NAME (the known name is for tokenizers without one), a file, or Jinja text. If unset, the
    template of the tokenizer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as {enable_thinking: false}, for every row. Those of a dataset and of the
    column chat_template_kwargs of a row come before it."""
    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the loaded weights. If unset, determined by bf16 and fp16."""
    device_map: str | dict[str, str | int] | None = None
    """Placement of the model's parts, as in transformers. If unset, the trainer places the model."""
    max_memory: dict[str | int, str | int] | None = None
    """Memory of each device, for example {0: 20GiB, cpu: 64GiB}, for device_map: auto, which is then the default."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "scattermoe", "sonicmoe"] | None = None
    """Computation of a mixture of experts: one expert at a time, or batched or grouped matrix products. If unset, and
    with the names of axolotl's kernels scattermoe and sonicmoe, grouped_mm where the machine supports it."""
    model_quantization_config: Literal["Mxfp4Config"] | None = None
    """For models that are stored in MXFP4, such as gpt-oss: their weights are dequantised when they are loaded, with or
    without this key."""
    bnb_config_kwargs: BitsAndBytesKeys = Field(default_factory=BitsAndBytesKeys)
    """Settings of bitsandbytes for load_in_4bit and load_in_8bit, which ebft merge-lora repeats."""
    reinit_weights: bool = False
    """Start from random weights, of the model's own initialisation, instead of the weights of base_model."""
    qat: QatSection | None = None
    """Quantisation-aware training with torchao: forward passes round weights, and inputs, as quantisation does. Only
    for SFT without an adapter. What is saved is not rounded, see ebft quantize."""
    load_in_4bit: bool = Field(False, description="Load the base weights in 4 bits (adapter: qlora).")
    quantize_moe_experts: bool = False
    """Also store fused experts in 4 or 8 bits (load_in_4bit, load_in_8bit); a layer dequantises them while it runs."""
    load_in_8bit: bool = Field(False, description="Load the base weights in 8 bits (adapter: lora).")

    unfrozen_parameters: Annotated[list[NotBlank], Field(min_length=1)] | None = None
    """Regular expressions of parameter names, or of their names in the checkpoint, compared from the start of the name:
    without an adapter, only the parameters that match one are trained. One with a negative lookahead is compared with
    other names only if it matches no name in the model. If unset, all are trained."""

    _model_paths = paths("base_model", "base_model_config", "tokenizer_config")

    @property
    def model_name(self) -> str:
        """The base model as the config names it, with its GGUF file if there is one."""
        return self.base_model if self.gguf_file is None else f"{self.base_model.rstrip('/')}/{self.gguf_file}"

    @field_validator("added_tokens_overrides", mode="before")
    @classmethod
    def _ids_as_numbers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        is_number = lambda key: isinstance(key, str) and key.isascii() and key.isdigit()  # keys of JSON are strings
        return {int(key) if is_number(key) else key: text for key, text in value.items()}


class PrecisionKeys(Section):
    """Data types of weights and computation."""

    bf16: bool | Literal["auto"] = "auto"
    """Train in bfloat16, including the weights (without an adapter, torch_dtype: float32 preserves small updates). auto
    enables it if the GPU supports it."""
    fp16: bool = Field(False, description="Train in float16 mixed precision.")
    fp8: bool = False
    """Compute the products of linear layers, except the output layer, in float8 with torchao, during training of all
    weights. Weights, frozen copies and what is saved keep their dtype. Needs a GPU of compute capability 8.9 (Ada,
    Hopper); on CPU, it is for tests."""
    tf32: bool | Literal["auto"] | None = None
    """TF32 matrix products, which auto enables on Ampere and newer GPUs. If unset, PyTorch's default."""


class AttentionKeys(Section):
    """Attention implementation; the flags are aliases for its values."""

    attn_implementation: str | None = None
    """Attention implementation of the model: eager, sdpa, flash_attention_2, flash_attention_3, flex_attention (or
    flex), or a kernel on the Hub such as kernels-community/flash-attn2. If unset, selected automatically for the model
    and the machine."""
    flash_attention: bool | None = Field(None, description="Alias for attn_implementation: flash_attention_2.")
    flex_attention: bool | None = Field(None, description="Alias for attn_implementation: flex_attention.")
    sdp_attention: bool | None = Field(None, description="Alias for attn_implementation: sdpa.")
    eager_attention: bool | None = Field(None, description="Alias for attn_implementation: eager.")

    @field_validator("attn_implementation")
    @classmethod
    def _in_full(cls, name: str | None) -> str | None:
        return "flex_attention" if name == "flex" else name


MAX_RANK = 2**16  # more than any model has hidden units


class AdapterKeys(Section):
    """LoRA adapters."""

    adapter: Literal["lora", "qlora"] | None = None
    """Adapter to train. If unset, all weights are trained."""
    lora_r: Annotated[int, Field(ge=1, le=MAX_RANK)] | None = Field(None, description="Rank of the adapter.")
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Scaling of the adapter: its output is multiplied by lora_alpha / lora_r. If unset, 2 * lora_r."""
    lora_rank_pattern: dict[NotBlank, Annotated[int, Field(ge=1, le=MAX_RANK)]] = Field(default_factory=dict)
    """Other ranks of modules, by the ends of their names, as regular expressions: {down_proj: 32}."""
    lora_alpha_pattern: dict[NotBlank, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other values of lora_alpha, in the same way."""
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the adapter's input.")
    lora_target_modules: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] | None = None
    """Modules to adapt: a list of name suffixes, or one regular expression, which may name them as in a multimodal
    model whose text model is trained. With lora_target_linear, a list is adapted in addition to the linear layers.
    all-linear is an alias for lora_target_linear: true. For many mixtures of experts, PEFT takes gate_proj, up_proj and
    down_proj (Mixtral: w1, w2, w3) for the fused experts."""
    lora_target_linear: bool = False
    """Adapt every linear layer except the output layer, routers, and out_proj of Mamba, which PEFT refuses. Fused
    experts are not linear layers; see lora_target_parameters. The first lines of a run name what is adapted."""
    lora_target_linear_modules: Annotated[list[NotBlank], Field(min_length=1)] | None = None
    r"""Linear layers to adapt, in addition to other targets, as a list of regular expressions, which are compared with
    names or their ends after a dot, for example layers\.[01]\.self_attn\.(q|v)_proj."""
    lora_target_parameters: Annotated[list[NotBlank], Field(min_length=1)] | None = None
    """Parameters to adapt that are not weights of linear layers, as a list of name suffixes: the fused experts of a
    mixture of experts, for example mlp.experts.gate_up_proj and mlp.experts.down_proj."""
    lora_modules_to_save: list[str] | None = None
    """Modules that are fully trained and saved in addition to the adapter."""
    peft_use_dora: bool = False
    """DoRA: train the norm of each output's weights separately from their direction."""
    peft_use_rslora: bool = False
    """Rank-stabilised LoRA: multiply the output by lora_alpha / sqrt(lora_r) instead."""
    peft_layers_to_transform: Layer | Annotated[list[Layer], Field(min_length=1)] | None = None
    """Indices of the decoder layers to adapt, from 0. If unset, all layers."""
    peft_layers_pattern: NotBlank | Annotated[list[NotBlank], Field(min_length=1)] | None = None
    """Name of the list of layers to which peft_layers_to_transform refers. If unset, any list."""
    peft_init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True
    """Initial values of the adapter: true (PEFT's default), gaussian or orthogonal, which do not change the model's
    outputs; false: random values, which do."""
    lora_model_dir: NotBlank | None = None
    """Folder of a saved adapter to continue training. Its settings take precedence over the lora_ keys."""

    _adapter_path = paths("lora_model_dir")

    @model_validator(mode="before")
    @classmethod
    def _all_linear(cls, data: Any) -> Any:
        """Replace PEFT's name for all linear layers."""
        if isinstance(data, dict):  # empty lists, beside other targets
            targets = ("lora_target_modules", "lora_target_linear_modules", "lora_target_parameters")
            data = {key: value for key, value in data.items() if key not in targets or value != []}
        given = data.get("lora_target_modules") if isinstance(data, dict) else None
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or ALL_LINEAR not in names:
            return data
        if data.get("lora_target_linear") is False:
            raise ValueError(f"lora_target_modules: {ALL_LINEAR} contradicts lora_target_linear: false. Remove one.")
        rest = {key: value for key, value in data.items() if key != "lora_target_modules"}
        others = [name for name in names if name != ALL_LINEAR]
        return rest | ({"lora_target_modules": others} if others else {}) | {"lora_target_linear": True}


class ModelSettings(AdapterKeys, AttentionKeys, ModelKeys, PrecisionKeys):
    """Every key that loading a model reads."""


# Keys of FSDP1 that change nothing under FSDP2, and other names of keys.
_OF_FSDP1 = ("sync_module_states", "use_orig_params", "forward_prefetch", "limit_all_gathers")
_OF_FSDP1 += ("backward_prefetch", "backward_prefetch_policy")
_FSDP_NAMES = {
    "fsdp_version": "version",
    "offload_params": "cpu_offload",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "sharding_strategy": "reshard_after_forward",
}
_FSDP_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class FSDPKeys(Section):
    """The section `fsdp_config:`; its keys may have the prefix `fsdp_`."""

    version: int | None = Field(None, description="FSDP2 is always used.")
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] = "FULL_STATE_DICT"
    """FULL_STATE_DICT gathers the weights and the optimizer state of a checkpoint on one process, and saves them as a
    run without FSDP does. With SHARDED_STATE_DICT, every process saves its own part."""
    final_state_dict_type: Literal["FULL_STATE_DICT"] = "FULL_STATE_DICT"
    """No effect: the final model is always gathered and saved as safetensors."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after its forward pass. With false, all of them stay in memory until the
    backward pass, and each layer is gathered once per step."""
    cpu_offload: bool = Field(False, description="Keep parameters, gradients and optimizer state in CPU memory.")
    cpu_ram_efficient_loading: bool = False
    """Keep the weights in one process per machine until it has sent the others their parts."""
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    """The modules that are gathered one at a time: decoder layers, modules with more than min_num_params parameters, or
    only the model as a whole."""
    transformer_layer_cls_to_wrap: str | list[str] | None = None
    """Class names of the decoder layers. If unset, those that the model declares."""
    min_num_params: int = Field(0, ge=0, description="Number of parameters for SIZE_BASED_WRAP.")
    activation_checkpointing: bool = False
    """The same as gradient_checkpointing."""

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        found = {}
        for key, value in data.items():
            name = key.removeprefix("fsdp_") if isinstance(key, str) else key
            name = _FSDP_NAMES.get(name, name)
            if name == "reshard_after_forward" and isinstance(value, str):
                value = _FSDP_RESHARDS.get(value.upper(), value)
            if name == "version" and value not in (None, 2):
                warn(f"fsdp_config.{key}: {value} has no effect: fsdp uses FSDP2 only.")
            if name not in _OF_FSDP1:
                found[name] = value
        return found
