"""Configs from data and a model: what the rows are, and the settings that fit them, the model and the machine."""
