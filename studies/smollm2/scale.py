"""How large the study is: `smollm2` on the real model, `tiny` for its own test."""

from dataclasses import dataclass, field
from typing import Any

WARM_THREADS = 2  # whatever the machine has, as the order of sums may depend on their number


@dataclass(frozen=True)
class Scale:
    """Everything that is not in configs/, and the overrides that change those. Lengths are in tokens."""

    name: str
    base_model: str  # what a config's `base_model` names; for `tiny` it is made by the study itself
    rows: dict[str, int]  # of a task, by part
    long_tokens: dict[str, int]  # least tokens of a completion of `long` documents (raw: of the text), by task
    max_files: int | None = None  # of the standard library, instead of all of it and the installed packages
    prompt: int = 96  # longest prompt
    shortest: int = 16  # completion
    longest: int = 72  # completion
    piece: int = 120  # of raw text
    rates: tuple[float, ...] = ()  # that `--sweep` tries
    sweep_steps: int = 40
    steps: int = 200
    structured_steps: int = 50
    warm_steps: int = 60
    fewer_steps: dict[str, int] = field(default_factory=dict)  # than `steps`, by task or start
    sampling: dict[str, int] = field(default_factory=dict)  # documents, samples, max_new_tokens
    methods: dict[str, tuple[str, ...]] = field(default_factory=dict)  # overrides of a method's config
    shape: dict[str, Any] | None = None  # of the tiny Llama
    vocab_size: int = 0

    def longest_rollout(self, task: str) -> int:
        """Tokens of the rollouts of `long` documents: the largest power of two that these have room for."""
        room = self.long_tokens[task] - (64 if task == "raw" else 0)
        return 2 ** (max(8, room).bit_length() - 1)

    @property
    def is_tiny(self) -> bool:
        return self.shape is not None


_TINY = (
    "micro_batch_size=2",
    "gradient_accumulation_steps=1",
    "warmup_steps=1",
    "logging_steps=1",
    "max_steps=2",
    "save_steps=1",
    "lora_r=2",
)

SCALES = {
    "smollm2": Scale(
        name="smollm2",
        base_model="smollm2-135m",
        rows={"train": 3240, "warm": 970, "validation": 200, "test": 200, "long": 48},
        long_tokens={"functions": 128, "raw": 208, "translation": 64},
        rates=(3e-4, 1e-3, 3e-3),
        # Raw text has 12 blocks a document where functions have 5, so that 40 steps, the length of the sweep, hold the
        # rollouts of 100. From a warm start, as long as that start.
        fewer_steps={"raw": 40, "warm": 60},
        sampling={"documents": 96, "samples": 4, "max_new_tokens": 96},
    ),
    "tiny": Scale(
        name="tiny",
        base_model="",
        rows={"train": 12, "warm": 4, "validation": 4, "test": 4, "long": 2},
        long_tokens={"functions": 64, "raw": 64, "translation": 24},
        max_files=120,
        prompt=160,
        longest=160,
        rates=(2e-3,),
        sweep_steps=2,
        steps=2,
        structured_steps=2,
        warm_steps=2,
        sampling={"documents": 4, "samples": 2, "max_new_tokens": 8},
        shape={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        vocab_size=512,
        methods={
            "sft": _TINY,
            "ebft": _TINY,
            "sdft": (*_TINY, "micro_batch_size=4", "trl.num_generations=2", "trl.max_completion_length=8"),
            "rlvr": (*_TINY, "micro_batch_size=4", "trl.num_generations=2", "trl.max_completion_length=8"),
            "structured": (
                *_TINY,
                "micro_batch_size=4",
                "trl.num_generations=2",
                "trl.max_completion_length=8",
                "trl.use_vllm=false",
                "trl.async_prefetch=false",
            ),
            "evaluation": ("micro_batch_size=4", "sequence_len=512", "evaluation.bootstrap=0"),
        },
    ),
}
