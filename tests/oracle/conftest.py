"""The hand-written plans of the checker's tests are read here as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
