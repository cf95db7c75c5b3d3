"""Data: datasets from the Hub or from files, converted to rows of tokens or prompts by transforms, and collated."""
