"""Training of reward models: one score per text (comparisons.py), or the class of each step (steps.py)."""
