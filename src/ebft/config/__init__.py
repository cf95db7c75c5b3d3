"""The run config: loading, overrides, checks, and the base class of its sections. Does not import torch.

Keys are declared in the `keys.py` of the package that reads them; `options` declares those of `ebft:`, `trl` those of
`trl:`. `schema` combines them, `checks` validates combinations of keys, `load` reads files.
"""
