"""Models: the base model, its tokenizer and its adapter."""
