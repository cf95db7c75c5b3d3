"""The run config: loading, overrides, checks, and what every section of keys has in common; imports no torch.

Keys are declared where they are read, in files called `keys.py`; `options` declares those of `ebft:`, `trl` those of
`trl:`. `schema` joins them, `checks` holds what concerns several of them, `load` reads files.
"""
