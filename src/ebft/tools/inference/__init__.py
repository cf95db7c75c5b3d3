"""Sampling from trained models: interactively, beside the base model, and with rewards."""
