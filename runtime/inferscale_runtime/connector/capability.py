"""The capability: proof that a claim was planned by this server (pure).

A client could otherwise name rows of another user's memory in ``kv_transfer_params``. The code is
an HMAC by the server's secret over everything that the engine acts on. The cache salt is keyed by
the same secret, so that nobody can compute another user's salt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PARAMS_KEY = "inferscale"
"""Our key inside ``kv_transfer_params``."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the scheduler side is told about one request.

    Attributes:
        num_tokens: Prompt tokens claimed as computed.
        runs: ``(first row, rows)`` in the slab, in prompt order; the rows add up to ``num_tokens``.
        slot: Lease slot.
        generation: Lease generation.
    """

    num_tokens: int
    runs: tuple[tuple[int, int], ...]
    slot: int
    generation: int


def _code(secret: bytes, claim: Claim, salt: str, prompt_token_ids: Sequence[int]) -> str:
    body = [
        claim.num_tokens,
        [list(run) for run in claim.runs],
        claim.slot,
        claim.generation,
        salt,
        list(prompt_token_ids[: claim.num_tokens]),
    ]
    text = json.dumps(body, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def seal_claim(
    secret: bytes, claim: Claim, salt: str, prompt_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Writes a claim as ``kv_transfer_params`` value."""
    return {
        "n": claim.num_tokens,
        "runs": [list(run) for run in claim.runs],
        "lease": [claim.slot, claim.generation],
        "code": _code(secret, claim, salt, prompt_token_ids),
    }


def open_claim(
    secret: bytes, value: object, salt: str | None, prompt_token_ids: Sequence[int]
) -> Claim | None:
    """Reads a claim back.

    Args:
        secret: The server's secret.
        value: What stands in ``kv_transfer_params``; untrusted.
        salt: The request's cache salt.
        prompt_token_ids: The request's prompt.

    Returns:
        The claim, or None when it is malformed, forged or of another prompt.
    """
    try:
        if not isinstance(value, dict):
            return None
        slot, generation = (int(part) for part in value["lease"])
        runs = tuple((int(start), int(rows)) for start, rows in value["runs"])
        claim = Claim(int(value["n"]), runs, slot, generation)
        code = str(value["code"])
    except (KeyError, OverflowError, TypeError, ValueError):
        return None
    # A claim without a salt would publish injected blocks to everybody's prefix cache.
    if not salt or sum(rows for _, rows in claim.runs) != claim.num_tokens:
        return None
    if not 0 < claim.num_tokens < len(prompt_token_ids):
        return None
    # As bytes: the comparison of strings raises for anything but ASCII.
    expected = _code(secret, claim, salt, prompt_token_ids).encode()
    return claim if hmac.compare_digest(expected, code.encode("utf-8", "replace")) else None


def cache_salt(
    secret: bytes,
    tenant: str,
    user: str,
    fingerprint: str,
    keys: Sequence[str],
    mode: str,
    epoch: int,
) -> str:
    """Salt of a request with memory: equal only for the same user, epoch, segments and mode.

    The epoch rises when a fact or turn is deleted or changed, so that no block from before is hit.

    Returns:
        64 hex characters, a legal vLLM ``cache_salt``.
    """
    body = json.dumps([tenant, user, epoch, fingerprint, list(keys), mode], separators=(",", ":"))
    return hmac.new(secret, body.encode(), hashlib.sha256).hexdigest()
