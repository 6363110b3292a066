from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Tests run with --import-mode=importlib, which does not put their folder on the path.
_path = Path(__file__).with_name("registries.py")
_spec = importlib.util.spec_from_file_location("metric_registries", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["metric_registries"] = _module
_spec.loader.exec_module(_module)
