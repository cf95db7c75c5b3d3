"""One attention implementation from `attn_implementation` and the flags that are other names for it."""

from ebft.config.model import AttentionKeys
from ebft.errors import ConfigError

FLAGS = {
    "flash_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}


def resolve_attention(keys: AttentionKeys) -> str | None:
    """The implementation that was asked for, None if none was; two different ones are refused."""
    if keys.xformers_attention:
        raise ConfigError(
            "xformers_attention: true is not available, since transformers has no xformers attention. "
            "Set attn_implementation: sdpa, which uses the same memory-saving kernels."
        )
    asked = {flag: value for flag, value in FLAGS.items() if getattr(keys, flag)}
    if keys.attn_implementation is not None:
        asked["attn_implementation"] = keys.attn_implementation
    chosen = set(asked.values())
    if len(chosen) > 1:
        given = ", ".join(f"{key}: {_as_given(key, value)}" for key, value in asked.items())
        raise ConfigError(
            f"More than one attention implementation is set ({given}). Keep one line: "
            f"attn_implementation: {' | '.join(sorted(chosen))}."
        )
    refused = [flag for flag, value in FLAGS.items() if getattr(keys, flag) is False and value in chosen]
    if refused:
        value = keys.attn_implementation
        raise ConfigError(f"{refused[0]}: false contradicts attn_implementation: {value}. Remove one of them.")
    return chosen.pop() if chosen else None


def _as_given(key: str, value: str) -> str:
    return "true" if key in FLAGS else value
