"""Running vLLM's OpenAI server for structured training; does not depend on the training code."""
