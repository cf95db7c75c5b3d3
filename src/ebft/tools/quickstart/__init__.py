"""`ebft quickstart`: text, base model, fine-tuning of a few minutes, measurement before and after, report."""
