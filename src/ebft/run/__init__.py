"""A run from a config: its keys, its arguments, training, checkpoints, Ctrl-C, the hub."""
