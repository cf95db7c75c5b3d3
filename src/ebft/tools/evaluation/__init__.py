"""Evaluation and comparison of models on held-out data: cross-entropy, feature matching and downstream metrics."""
