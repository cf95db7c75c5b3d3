"""Keys of the config about the base model, its tokenizer, attention and adapter."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ebft.config.section import Section

ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class SpecialTokens(Section):
    """The section `special_tokens:`."""

    pad_token: str | None = Field(None, description="Token that fills short rows up.")
    eos_token: str | None = Field(None, description="Token that ends a text.")
    bos_token: str | None = Field(None, description="Token that starts a text.")
    unk_token: str | None = Field(None, description="Token for what the vocabulary lacks.")


class ModelKeys(Section):
    """Base model and tokenizer."""

    base_model: str = Field(description="Model to fine-tune: a folder, a name that `ebft fetch` lists, or a hub name.")
    gguf_file: str | None = Field(
        None,
        description="GGUF file in the folder base_model to load the model and its tokenizer from, as dense weights.",
    )
    base_model_config: str | None = Field(
        None, description="Folder or hub name of the model configuration; unset is base_model."
    )
    revision_of_model: str | None = Field(None, description="Hub revision of the model and its tokenizer.")
    tokenizer_config: str | None = Field(None, description="Folder or hub name of the tokenizer; unset is base_model.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with the model's files.")
    special_tokens: SpecialTokens = Field(
        default_factory=SpecialTokens, description="Special tokens that replace the tokenizer's own."
    )
    chat_template: str | None = Field(
        None,
        description="Chat template: a known name, tokenizer_default or Jinja text; unset is the tokenizer's.",
    )
    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Type of the loaded weights; unset follows bf16 and fp16."
    )
    device_map: str | dict[str, str | int] | None = Field(
        None,
        description="Where the model's parts go, as transformers reads it; unset leaves it to the trainer.",
    )
    load_in_4bit: bool = Field(False, description="Load the base weights in 4 bits (adapter: qlora).")
    load_in_8bit: bool = Field(False, description="Load the base weights in 8 bits (adapter: lora).")


class AttentionKeys(Section):
    """Attention implementation; the flags are other names for its values."""

    attn_implementation: str | None = Field(
        None,
        description="Attention implementation of the model: eager, sdpa, flash_attention_2, flash_attention_3, "
        "flex_attention (or flex), or a kernel on the hub such as kernels-community/flash-attn2; unset chooses what "
        "fits model and machine.",
    )
    flash_attention: bool | None = Field(None, description="Same as attn_implementation: flash_attention_2.")
    flex_attention: bool | None = Field(None, description="Same as attn_implementation: flex_attention.")
    sdp_attention: bool | None = Field(None, description="Same as attn_implementation: sdpa.")
    eager_attention: bool | None = Field(None, description="Same as attn_implementation: eager.")
    xformers_attention: bool | None = Field(
        None, description="Not available: transformers has no xformers attention; true is refused."
    )

    @field_validator("attn_implementation")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        """An implementation of transformers, or a kernel on the hub (`owner/name`)."""
        name = "flex_attention" if name == "flex" else name
        if name is not None and name not in ATTENTION_IMPLEMENTATIONS and "/" not in name:
            known = ", ".join(map(repr, ATTENTION_IMPLEMENTATIONS))
            raise ValueError(f"attn_implementation: {name!r} is unknown; it must be {known}, or a kernel on the hub.")
        return name


class AdapterKeys(Section):
    """LoRA adapters."""

    adapter: Literal["lora", "qlora"] | None = Field(None, description="Adapter to train; unset trains all weights.")
    lora_r: Annotated[int, Field(ge=1)] | None = Field(None, description="Rank of the adapter.")
    lora_alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Scale of the adapter: its output is multiplied by lora_alpha / lora_r."
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in front of the adapter.")
    lora_target_modules: str | list[str] | None = Field(
        None, description="Modules that get an adapter: a list of name endings or one regular expression."
    )
    lora_target_linear: bool = Field(False, description="Put an adapter on every linear layer but the output layer.")
    lora_modules_to_save: list[str] | None = Field(None, description="Modules trained in full beside the adapter.")
    lora_model_dir: str | None = Field(
        None, description="Folder of an adapter to go on training; its own settings win over the lora_ keys."
    )
