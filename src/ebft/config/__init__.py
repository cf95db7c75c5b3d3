"""What a config consists of: reading YAML and overrides, the base class of sections, and keys. Does not import torch.

`keys` declares them, in a file for each package that reads them; `options` declares the keys of `ebft:` and `trl` the
keys of `trl:`. `ebft.methods` reads them, and `ebft.run.config` makes a run config of them and checks combinations.
"""
