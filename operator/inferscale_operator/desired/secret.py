"""The Secret with a model's API key; made once, so that a key changed by hand stays."""

from __future__ import annotations

import base64

from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import SECRET, Manifest
from inferscale_operator.desired.selection import COMPONENT

API_KEY = "api-key"
"""Key of the Secret, whoever made it."""


def api_key_secret_name(owner: naming.Owner) -> str:
    """Name of the Secret that the operator makes."""
    return f"{owner['metadata']['name']}-api-key"


def build_api_key_secret(owner: naming.Owner, key: str) -> Manifest:
    """The Secret.

    Args:
        owner: The PersonalizedModel.
        key: The API key; random, made by the caller.
    """
    body = {"type": "Opaque", "data": {API_KEY: base64.b64encode(key.encode()).decode()}}
    return naming.child(SECRET, owner, api_key_secret_name(owner), COMPONENT, body)
