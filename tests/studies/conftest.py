"""Makes the parts of the study in studies/smollm2 importable, as running its run.py does."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "studies" / "smollm2", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
