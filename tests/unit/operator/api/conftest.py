"""Makes ``tests`` importable: the cases are shared with the tests on a real API server."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))
