"""The chat tokenizer of the structured tests."""

from tests.structured.conftest import chat_tokenizer

__all__ = ["chat_tokenizer"]
