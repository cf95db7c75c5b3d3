"""Sampling from trained models: interactively, beside the base model, with rewards, and in a web page."""
