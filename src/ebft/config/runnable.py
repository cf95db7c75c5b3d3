"""Whether a config that loads can also be trained, here and in this version."""

import os

from ebft.config.options import check_trainable
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError


def check_runnable(config: RunConfig) -> None:
    """Refuse what loads as a config but cannot be trained here; ConfigError says what to do instead."""
    if config.rl == "grpo" or (config.rl == "ebft" and not config.is_strided):
        asked = "rl: grpo" if config.rl == "grpo" else "ebft.mode: structured (the default)"
        raise ConfigError(
            f"{asked} cannot be trained in this version. Set ebft.mode: strided with rl: ebft for energy-based "
            "fine-tuning, or remove rl for plain fine-tuning."
        )
    if config.is_strided:
        check_trainable(config.ebft)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if config.ddp is False and processes > 1:
        raise ConfigError(f"ddp: false, but {processes} processes were launched. Launch one, or remove ddp.")
    if config.ddp and processes == 1:
        raise ConfigError(
            "ddp: true, but only one process runs. Launch several, for example torchrun --nproc-per-node 2 "
            "-m ebft.cli train CONFIG, or remove ddp."
        )
