"""Where the files are; importing it makes the benchmarks' machine card importable."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIGS = HERE / "configs"
RESULTS = HERE / "results"

for folder in (ROOT, HERE):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
