"""Data: any dataset the ecosystem loads, turned into rows of tokens or prompts by a transform, and into batches."""
