"""Preference data: pairs of a chosen and a rejected completion of a prompt, or single completions with a label."""
