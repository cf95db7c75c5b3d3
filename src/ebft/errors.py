"""Errors that a user can correct, with one class for each source of error."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft.machine import free_disk


class EBFTError(ValueError):
    """Base class of errors caused by invalid input; the message names the cause and how to correct it."""


class ConfigError(EBFTError):
    """A config file, an override or an option is invalid."""


class MissingPackageError(ConfigError):
    """A package that a valid config needs is not installed; the message says what installs it."""


class DataError(EBFTError):
    """A dataset cannot be read, or its rows cannot be used."""


class ModelError(EBFTError):
    """A model, tokenizer or adapter cannot be loaded or is not supported."""


class NonFiniteLossError(EBFTError):
    """A loss, gradient, reward or metric is NaN or infinite; in training, raised before the update."""


class RewardError(EBFTError):
    """A user-defined reward function raised an error, or did not return one reward per completion."""


class RolloutError(EBFTError):
    """Completions cannot be generated: the server is unavailable, does not match the run, or returns an error."""


class SaveError(EBFTError):
    """A checkpoint or the final model cannot be written, for example because the disk is full."""

    @classmethod
    def of(cls, folder: Path, error: BaseException, newest: Path | None = None) -> "SaveError":
        """The error for a folder that could not be written; earlier checkpoints, with `newest`, are unchanged."""
        kept = "Earlier checkpoints are unchanged" + ("" if newest is None else f", the newest is {newest}")
        return cls(
            f"{folder} could not be saved: {save_problem(folder, error)} {kept}. Free disk space or correct its "
            "permissions, then resume with auto_resume_from_checkpoints: true."
        )


def save_problem(folder: Path, error: BaseException) -> str:
    """What was raised when `folder` was written, with the free space on its disk."""
    free, existing = free_disk(folder.absolute().parent)
    return f"{cause(error)} ({free / 2**20:,.0f} MiB are free in {existing})."


class FetchError(EBFTError):
    """A file cannot be downloaded, does not match its checksum, or cannot be written to the cache."""


class ServerError(EBFTError):
    """The vLLM server exited unexpectedly or did not become ready; the message contains the end of its log."""


class LaunchError(EBFTError):
    """The processes of a run cannot be started, or a process was killed; `status` is the exit status for it."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class RunError(EBFTError):
    """A folder is not the output folder of a run, or lacks the files that a command reads."""


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Context manager that says in an error of another library what was being done, such as "reading rows.jsonl".

    The command line prints the words; in Python they are a note of the exception. Errors of this package say it
    themselves.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, EBFTError):
            error.add_note(f"while {what}")
        raise


def told(error: BaseException) -> str:
    """What an exception of another library is and what was being done, as one message."""
    notes = [note for note in reversed(getattr(error, "__notes__", ())) if note.startswith("while ")]
    words = cause(error)
    named = words if words.startswith(type(error).__name__) else f"{type(error).__name__}: {words}"
    return f"{', '.join(notes)}: {named}" if notes else named


@contextmanager
def prefixed(prefix: str, kinds: type[EBFTError] | tuple[type[EBFTError], ...] = EBFTError) -> Iterator[None]:
    """Context manager in which errors get a prefix, such as the key that they are about."""
    try:
        yield
    except kinds as error:
        raise type(error)(f"{prefix}: {error}") from error


LONGEST_MESSAGE = 1400  # characters that are printed of an error
LONGEST_CAUSE = 500  # characters of a message of another library within it
_OMITTED = " [...] "


def shortened(text: object, longest: int = LONGEST_CAUSE) -> str:
    """`text` with the middle left out if it has more than `longest` characters."""
    words = str(text).strip().encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be printed
    if len(words) <= longest:
        return words
    end = longest // 4
    return words[: longest - end - len(_OMITTED)] + _OMITTED + words[-end:]


def some_of(names: Iterable[str], most: int = 5) -> str:
    """The first names in alphabetical order, and the number of the others."""
    found = sorted(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def cause(error: BaseException) -> str:
    """The message of an exception of another library, shortened; its type if it has none, or only a key."""
    try:
        words = shortened(error)
    except Exception:  # of its own __str__
        words = ""
    if not words or isinstance(error, KeyError | AttributeError | TypeError | AssertionError | RecursionError):
        return f"{type(error).__name__}: {words}" if words else type(error).__name__
    return words


def warn(message: str) -> None:
    """Warn of a setting that has not the effect that the user may expect, at the line of the caller's caller."""
    warnings.warn(message, stacklevel=3)
