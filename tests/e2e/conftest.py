"""Tests run with --import-mode=importlib: the repository's root is put on the path for helpers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
