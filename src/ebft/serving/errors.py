"""What goes wrong while a server runs."""

from ebft.errors import EBFTError


class ServerError(EBFTError):
    """The vLLM server ended by itself or did not become ready; the message holds the end of its log."""
