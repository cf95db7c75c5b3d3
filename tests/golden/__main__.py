"""`python -m tests.golden --write [NAME ...]`: write the golden files again. A commit that changes one says why."""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from tests.golden.runs import FOLDER, RUNS, machine, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)} (default: all)")
    for name in parser.parse_args().names or RUNS:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            found = {"machine": machine(), **run(name, Path(folder))}
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {len(found['steps'])} entries")


if __name__ == "__main__":
    main()
