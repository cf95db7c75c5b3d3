"""Launching `ebft train` in several processes, on one machine or several, and sweeps over config values."""
