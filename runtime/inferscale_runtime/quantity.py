"""Kubernetes quantities as whole numbers (pure)."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from inferscale_runtime.errors import ConfigError

MAX_QUANTITY = (1 << 63) - 1

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE]?)|[eE](?P<exponent>[+-]?[0-9]{1,4}))"
)
_BINARY = {f"{letter}i": 1024 ** (n + 1) for n, letter in enumerate("KMGTPE")}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def exact_quantity(text: str) -> Fraction:
    """Reads a Kubernetes quantity exactly: ``500m`` is one half.

    Args:
        text: For example ``8Gi``, ``1.5G``, ``1e9``, ``500m`` or ``500``.

    Raises:
        ConfigError: When it is no quantity.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"quantity '{text[:64]}': not a Kubernetes quantity; write for example 8Gi, 500M or 1e9"
        )
    suffix = match["suffix"] or ""
    scale = (
        Fraction(_BINARY[suffix])
        if suffix in _BINARY
        else Fraction(10) ** (int(match["exponent"]) if match["exponent"] else _DECIMAL[suffix])
    )
    whole, _, decimals = match["number"].partition(".")
    number = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals)) * scale
    return -number if match["sign"] == "-" else number


def parse_quantity(text: str) -> int:
    """Reads a Kubernetes quantity as a whole number.

    Fractions round away from zero and values above 2^63-1 are capped, as in Kubernetes.

    Args:
        text: For example ``8Gi``, ``1.5G``, ``1e9`` or ``500``.

    Raises:
        ConfigError: When it is no quantity.
    """
    number = exact_quantity(text)
    magnitude = min(math.ceil(abs(number)), MAX_QUANTITY)
    return -magnitude if number < 0 else magnitude


def format_quantity(value: int) -> str:
    """Writes bytes as the shortest exact quantity with a binary suffix, for example ``8Gi``."""
    for suffix, scale in reversed(_BINARY.items()):
        if value and value % scale == 0:
            return f"{value // scale}{suffix}"
    return str(value)
