"""`ebft train` under FSDP2 on CPU, once per list of keys: `torchrun sharded_command.py CONFIG KEY=VALUE -- ...`."""

import os
import sys
from itertools import groupby

from torch import distributed

import ebft.cli.train
import ebft.run.training
from ebft.cli import app
from tests.sharding import shard_on_cpu


def main(config, *words):
    shard_on_cpu()
    ebft.run.training.check_machine = lambda *_: None  # refuses fsdp without GPUs
    ebft.cli.train.leave_process_group = lambda: None
    for is_run, overrides in groupby(words, lambda word: word != "--"):
        if is_run:
            app(["train", config, *overrides], standalone_mode=False)
    distributed.barrier()
    os._exit(0)  # threads that FSDP2 leaves over gloo abort the interpreter's exit now and then


if __name__ == "__main__":
    main(*sys.argv[1:])
