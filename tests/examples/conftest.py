"""Makes the parts of the quickstart importable, as running examples/quickstart.py does."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
