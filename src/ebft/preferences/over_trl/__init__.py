"""What is used of the private interface of TRL's preference trainers.

tests/test_contracts.py checks it against the installed release.
"""
