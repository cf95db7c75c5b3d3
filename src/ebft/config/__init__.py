"""What a config consists of: reading YAML and overrides, the base class of sections, and keys. Does not import torch.

`keys` declares them, in a file for each package that reads them; `options` declares `ebft:`, `trl` the section
`trl:`. From the bottom up: `load` reads files and overrides, `base` has the groups of keys, `ebft.methods` reads them,
`checks` validates combinations of keys, `schema` adds the keys of methods and calls the checks.
"""
