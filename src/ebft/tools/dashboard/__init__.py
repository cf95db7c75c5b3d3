"""Watching a run through the files in its output folder: reading them, text, terminal dashboard and report.

Nothing in this room imports torch or transformers, and only `ebft.tools.dashboard.tui` imports textual.
"""
