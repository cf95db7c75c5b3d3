"""`python -m tests.golden --write [NAME ...]`: write the golden files again. A commit that changes one says why."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.runs import FOLDER, RUNS, machine, run

if __name__ == "__main__" and "--write" in sys.argv:
    torch.set_num_threads(1)
    for name in [word for word in sys.argv[1:] if word != "--write"] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found = {"machine": machine(), **run(name, Path(folder))}
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {len(found['steps'])} entries")
