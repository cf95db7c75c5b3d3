"""Evaluation of models on held-out data, side by side: cross-entropy, feature matching, downstream metrics."""
