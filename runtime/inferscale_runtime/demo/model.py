"""The demo's model: the built-in one, in the demo's own folder."""

from __future__ import annotations

from inferscale_runtime.encode.builtin import build_smollm2

__all__ = ["build_smollm2"]
