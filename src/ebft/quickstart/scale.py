"""How large the quickstart of a tiny model is: `full` for users, `test` for the script's own test."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scale:
    """Sizes that are not in tiny_base.yaml and tiny.yaml, and the overrides that change those."""

    max_files: int | None
    vocab_size: int
    shape: dict[str, int]
    groups: int  # of held-out windows
    base_overrides: list[str] = field(default_factory=list)
    ebft_overrides: list[str] = field(default_factory=list)


def _shape(width: int, layers: int) -> dict[str, int]:
    """Sizes of a Llama with heads of 32 numbers."""
    return {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
    }


SCALES = {
    "full": Scale(max_files=None, vocab_size=4096, shape=_shape(128, 4), groups=24),
    "test": Scale(
        max_files=60,
        vocab_size=512,
        shape=_shape(32, 4),
        groups=2,
        base_overrides=["max_steps=3", "sequence_len=64", "micro_batch_size=2", "warmup_steps=1", "logging_steps=1"],
        ebft_overrides=["max_steps=2", "sequence_len=64", "micro_batch_size=2", "warmup_steps=1", "logging_steps=1"],
    ),
}
