"""Configs of the kinds that axolotl's examples have, written from the format, as parts that are put together."""
