"""The terminal dashboard, the only importer of textual."""
