"""The training methods: the keys that a method reads, the rows that it needs, its checks and metrics, and how it builds
its training arguments and its trainer.

To add a method, add a class and a line in `METHODS`; its `keys` become config keys. Code outside this
package does not depend on which method is used. A method that is selected with a key of its own instead of `rl` has a
line in `FLAGS`.
"""

# (rl, ebft.mode) -> the class, imported on first use; mode is None for methods that do not read it.
METHODS: dict[tuple[str | None, str | None], str] = {
    ("ebft", "strided"): "ebft.methods.ebft:Strided",
    ("ebft", "structured"): "ebft.methods.ebft:Structured",
    ("grpo", None): "ebft.methods.grpo:GRPO",
    ("gdpo", None): "ebft.methods.grpo:GDPO",
    ("sdft", None): "ebft.methods.sdft:SDFT",
    ("dpo", None): "ebft.methods.preferences:DPO",
    ("ipo", None): "ebft.methods.preferences:IPO",
    ("kto", None): "ebft.methods.preferences:KTO",
    ("orpo", None): "ebft.methods.preferences:ORPO",
    ("simpo", None): "ebft.methods.preferences:SimPO",
    (None, None): "ebft.methods.sft:SFT",
}
# Keys that select a method when they are true and `rl` is not set -> the class.
FLAGS: dict[str, str] = {
    "reward_model": "ebft.methods.reward_models:RewardModel",
    "process_reward_model": "ebft.methods.reward_models:ProcessRewardModel",
}


def named_methods() -> dict[str, dict[str, object]]:
    """The keys that select each method, by its name on the command line: sft, ebft, ebft-structured, dpo, ..."""
    named: dict[str, dict[str, object]] = {}
    for rl, mode in METHODS:
        name = f"{rl}-{mode}" if rl in named else rl or "sft"
        named[name] = {"rl": rl} if mode is None else {"rl": rl, "ebft": {"mode": mode}}
    return named | {key.replace("_", "-"): {key: True} for key in FLAGS}
