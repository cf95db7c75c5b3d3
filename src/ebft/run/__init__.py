"""Training from a config: keys, training arguments, checkpoints, interruption, the Hub."""
