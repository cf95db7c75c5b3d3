"""The run config: loading, overrides, checks, and the base class of its sections. Does not import torch.

`keys` declares them, in a file for each package that reads them; `options` declares `ebft:`, `trl` the section
`trl:`. From the bottom up: `load` reads files and overrides, `base` has the groups of keys, `ebft.methods` reads them,
`checks` validates combinations of keys, `schema` adds the keys of methods and calls the checks.
"""
