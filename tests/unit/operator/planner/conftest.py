from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Tests run with --import-mode=importlib, which does not put their folder on the path.
_path = Path(__file__).with_name("world.py")
_spec = importlib.util.spec_from_file_location("planner_world", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["planner_world"] = _module
_spec.loader.exec_module(_module)
