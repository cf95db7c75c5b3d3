"""Errors that a user can correct, with one class for each source of error."""


class EBFTError(ValueError):
    """Base class of errors caused by invalid input; the message names the cause and how to correct it."""


class ConfigError(EBFTError):
    """A config file, an override or an option is invalid."""


class DataError(EBFTError):
    """A dataset cannot be read, or its rows cannot be used."""


class ModelError(EBFTError):
    """A model, tokenizer or adapter cannot be loaded or is not supported."""


class NonFiniteLossError(EBFTError):
    """A loss, gradient, reward or metric is NaN or infinite; in training, raised before the update."""


class RolloutError(EBFTError):
    """Completions cannot be generated: the server is unavailable, does not match the run, or returns an error."""


class FetchError(EBFTError):
    """A file cannot be downloaded, does not match its checksum, or cannot be written to the cache."""


class ServerError(EBFTError):
    """The vLLM server exited unexpectedly or did not become ready; the message contains the end of its log."""


class RunError(EBFTError):
    """A folder is not the output folder of a run, or lacks the files that a command reads."""
