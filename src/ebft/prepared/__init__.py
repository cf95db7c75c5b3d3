"""Rows that are prepared once and stored, under a key made of everything that determines them."""
