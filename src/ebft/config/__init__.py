"""The run config: declaration of every key, loading, overrides and checks; imports no torch.

`options` declares the EBFT options, the files named after subjects declare the other keys, `schema` joins
them, `checks` holds what concerns several keys, `load` reads files, `arguments` makes training arguments.
"""

from ebft.config.load import load_config
from ebft.config.options import (
    EBFTSection,
    StridedOptions,
    check_trainable,
    settle_single_sample,
    validate_options,
    with_options,
)
from ebft.config.runnable import check_runnable
from ebft.config.schema import RunConfig

__all__ = [
    "EBFTSection",
    "RunConfig",
    "StridedOptions",
    "check_runnable",
    "check_trainable",
    "load_config",
    "settle_single_sample",
    "validate_options",
    "with_options",
]
