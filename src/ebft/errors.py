"""The errors that a user can put right: one class per place where the mistake was made."""


class EBFTError(ValueError):
    """A mistake in what was given; its message says what, why it cannot work, and what to type instead."""


class ConfigError(EBFTError):
    """A config file, an override or an option is wrong."""


class DataError(EBFTError):
    """A dataset cannot be read, or its rows cannot be used."""


class ModelError(EBFTError):
    """A model, a tokenizer or an adapter cannot be loaded or cannot be trained this way."""


class NonFiniteLossError(EBFTError):
    """The loss or its gradient became NaN or infinite; training stopped before the update."""


class RolloutError(EBFTError):
    """Completions cannot be generated: no server, the wrong one, or one that does not answer as it should."""


class FetchError(EBFTError):
    """A file cannot be downloaded, is not the one that was pinned, or cannot be written to the cache."""
