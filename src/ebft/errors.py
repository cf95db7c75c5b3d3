"""Errors that a user can correct, with one class for each source of error."""

import shutil
from pathlib import Path


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


class SaveError(EBFTError):
    """A checkpoint or the final model cannot be written, for example because the disk is full."""

    @classmethod
    def of(cls, folder: Path, error: Exception) -> "SaveError":
        """The error for a folder that could not be written; earlier checkpoints are unchanged."""
        free = shutil.disk_usage(folder.parent).free / 2**20
        return cls(
            f"{folder} could not be saved: {error} ({free:,.0f} MiB are free in {folder.parent}). Earlier checkpoints "
            "are unchanged. Free disk space or correct its permissions, then resume with auto_resume_from_checkpoints: "
            "true."
        )


class FetchError(EBFTError):
    """A file cannot be downloaded, does not match its checksum, or cannot be written to the cache."""


class ServerError(EBFTError):
    """The vLLM server exited unexpectedly or did not become ready; the message contains the end of its log."""
