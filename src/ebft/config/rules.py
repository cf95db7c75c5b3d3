"""Rules that hold for a config file and for arguments made in Python alike, each written once.

A rule returns what to say, or None. `key` writes the name of an option as the caller knows it: `in_python` as arguments
of the trainers, `in_config` as keys of a config.
"""

from collections.abc import Callable

Key = Callable[[str], str]

# Arguments of the trainers -> keys of a config, where these differ.
_IN_CONFIG = {
    "per_device_train_batch_size": "micro_batch_size",
    "feature_device": "ebft.feature_device",
    "vllm_structured_outputs_regex": "trl.vllm_guided_decoding_regex",
    **{
        name: f"trl.{name}"
        for name in ("async_prefetch", "num_generations", "generation_batch_size", "use_vllm", "vllm_mode")
    },
}


def in_python(name: str) -> str:
    """The name of an argument of the trainers, as it is."""
    return name


def in_config(name: str) -> str:
    """The key of a config that sets the argument `name` of the trainers."""
    return _IN_CONFIG.get(name, name)


def prefetch(async_prefetch: bool, uses_server: bool, key: Key) -> str | None:
    if not async_prefetch or uses_server:
        return None
    return (
        f"{key('async_prefetch')} generates on a server while training goes on. Set {key('use_vllm')}: true with "
        f"{key('vllm_mode')}: server or managed, or remove it."
    )


def groups(completions: int, num_generations: int, key: Key) -> str | None:
    """`completions` are those of one process in a generation step."""
    if completions % num_generations == 0:
        return None
    return (
        f"{key('num_generations')} {num_generations} does not divide {completions}, the completions of a process in "
        f"one step ({key('per_device_train_batch_size')} times gradient_accumulation_steps, unless "
        f"{key('generation_batch_size')} is set): every prompt needs all of its completions in one step. Change one of "
        "them."
    )


def regex(pattern: str | None, use_vllm: bool, key: Key) -> str | None:
    if pattern is None or use_vllm:
        return None
    return f"{key('vllm_structured_outputs_regex')} needs vLLM. Set {key('use_vllm')}: true, or remove it."


def full_weights(uses_server: bool, has_adapter: bool, has_cuda: bool, key: Key) -> str | None:
    """Whether all weights can be sent to the server."""
    if not uses_server or has_adapter or has_cuda:
        return None
    return (
        "Full fine-tuning sends all weights to the vLLM server, which vLLM does between CUDA devices only, and there "
        f"is none here. Train an adapter (adapter: lora; peft_config in Python), or set {key('use_vllm')}: false."
    )


def feature_device(device: str | None, has_adapter: bool, key: Key) -> str | None:
    if device is None or not has_adapter:
        return None
    return (
        f"{key('feature_device')}: {device} has no effect with an adapter, since features come from the policy with "
        "its adapter disabled. Remove it."
    )


def compiled(key: Key) -> str:
    return (
        f"{key('torch_compile')}: true is set to false in strided mode: attention over rollouts changes its layout in "
        "every batch, and compiling the model again for each costs more than it saves."
    )


NEFTUNE = "noise in the embeddings would make training differ from the rollouts, which are sampled without it"
