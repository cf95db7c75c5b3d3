"""The parts of examples/quickstart.py: text, base model, measurement, report."""
