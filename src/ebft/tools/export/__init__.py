"""Models for use after training: adapters merged into their base model, and quantised models."""
