"""Streams of raw text for continual pretraining: documents are read, shuffled and packed while training runs."""
