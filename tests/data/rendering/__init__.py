"""Rows of every method compared with what the chat template renders; the expectations do not use the package's code."""
