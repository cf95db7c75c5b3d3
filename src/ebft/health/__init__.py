"""Recognising failing runs by their logged metrics: the conditions, a callback, and the outcome of a run."""
