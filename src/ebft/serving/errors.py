"""Errors of a running server."""

from ebft.errors import EBFTError


class ServerError(EBFTError):
    """The vLLM server exited unexpectedly or did not become ready; the message contains the end of its log."""
