"""How large the study is: `small` for two CPU cores, `large` for an accelerator, `tiny` for its own test."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """Everything that is not in configs/, and the overrides that change those."""

    name: str
    max_files: int | None  # of the library; None is all
    vocab_size: int
    shape: dict[str, Any]  # of the Llama
    seeds: tuple[int, ...]
    rates: tuple[float, ...]  # that `--sweep` tries
    settings: tuple[str, ...] | None  # of EBFT, by their names in cells.py; None is all
    documents: int  # of the test part that every model is measured on, and of the validation part
    raw_rows: int  # pieces of files to train on, in the task raw
    piece: int  # their length in characters: about sequence_len tokens, whose rest is cut
    evaluation: tuple[str, ...] = ()  # overrides of configs/evaluation.yaml
    raw: tuple[str, ...] = ()  # overrides of every config of the task raw
    methods: dict[str, tuple[str, ...]] = field(default_factory=dict)  # overrides of a method's config
    warm: tuple[str, ...] = ()  # further overrides of the warm start

    def overrides(self, method: str, task: str) -> tuple[str, ...]:
        """What this size changes in the config of `method`."""
        return (*(self.raw if task == "raw" else ()), *self.methods.get(method, ()))


def shape(width: int, layers: int, head: int = 32, **more: Any) -> dict[str, Any]:
    """Sizes of a Llama with heads of `head` numbers."""
    return {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": width // head,
        "num_key_value_heads": width // head,
        **more,
    }


def parameters(size: Size) -> int:
    """Parameters of the Llama, whose embedding is its output layer too."""
    width, vocabulary = size.shape["hidden_size"], size.vocab_size
    keys = width * size.shape["num_key_value_heads"] // size.shape["num_attention_heads"]
    layer = 2 * width**2 + 2 * width * keys + 3 * width * size.shape["intermediate_size"] + 2 * width
    return vocabulary * width + size.shape["num_hidden_layers"] * layer + width


_TINY = ("sequence_len=160", "micro_batch_size=2", "warmup_steps=1", "logging_steps=1", "max_steps=2")
_LARGE = ("sequence_len=1024", "bf16=auto")

SIZES = {
    # 1.3 million parameters.
    "small": Size(
        name="small",
        max_files=None,
        vocab_size=4096,
        shape=shape(128, 4),
        seeds=(0, 1, 2),
        rates=(1e-4, 3e-4, 1e-3, 3e-3),
        settings=None,
        documents=96,
        raw_rows=3200,
        piece=300,
        raw=("sequence_len=160",),
        warm=("max_steps=100", "learning_rate=3.0e-4"),
    ),
    # 100 million parameters: what the library's 10 MB can teach is seen after a few epochs, so it overfits less than it
    # would with more.
    "large": Size(
        name="large",
        max_files=None,
        vocab_size=16384,
        shape=shape(768, 12, head=64, initializer_range=0.02),
        seeds=(0, 1, 2),
        rates=(3e-6, 1e-5, 3e-5, 1e-4),
        settings=None,
        documents=600,
        raw_rows=4000,
        piece=1600,
        evaluation=(*_LARGE, "micro_batch_size=32", "evaluation.samples=8", "evaluation.max_new_tokens=128"),
        raw=("sequence_len=512",),
        methods={
            "base": (*_LARGE, "micro_batch_size=16", "max_steps=1200", "learning_rate=6.0e-4", "warmup_steps=100"),
            "sft": ("bf16=auto", "micro_batch_size=16", "max_steps=200", "learning_rate=3.0e-5"),
            "ebft": ("bf16=auto", "micro_batch_size=16", "max_steps=200", "learning_rate=3.0e-5"),
            "rlvr": (
                "bf16=auto",
                "micro_batch_size=64",
                "max_steps=200",
                "learning_rate=1.0e-5",
                "trl.max_completion_length=128",
            ),
        },
        warm=("max_steps=300", "learning_rate=3.0e-5"),
    ),
    "tiny": Size(
        name="tiny",
        max_files=120,
        vocab_size=512,
        shape=shape(32, 4),
        seeds=(0,),
        rates=(2e-3,),
        settings=("centre", "last_token"),
        documents=4,
        raw_rows=40,
        piece=300,
        evaluation=(
            "sequence_len=160",
            "evaluation.samples=2",
            "evaluation.max_new_tokens=8",
            "evaluation.bootstrap=20",
        ),
        methods={
            "base": _TINY,
            "sft": _TINY,
            "ebft": (*_TINY, "ebft.n_samples_per_prompt=4"),
            "rlvr": (
                *_TINY,
                "micro_batch_size=4",
                "trl.num_generations=2",
                "trl.max_completion_length=8",
            ),
        },
    ),
}
