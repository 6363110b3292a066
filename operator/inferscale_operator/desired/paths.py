"""Where things are in pods, and how ports are called: one place for builders and probes."""

from __future__ import annotations

STORE = "/store"
"""The store of an encoding or erasing pod."""
SERVER_STORES = "/stores"
"""Folder that holds a server's stores, each by its name."""
MODELS = "/models"
"""Model weights."""
HUB = f"{MODELS}/hub"
BUILTIN_MODELS = f"{MODELS}/builtin"
CONFIG = "/etc/inferscale"
CONFIG_FILE = f"{CONFIG}/config.json"
SOURCE = "/source"
"""Facts to encode."""
SECRETS = "/etc/inferscale-secrets"
"""Folder that holds secrets as files, each in a folder of its purpose."""
EMBEDDER_KEY_FILE = f"{SECRETS}/embedder/api-key"
AUTHORIZATION_FILE = f"{SECRETS}/source/authorization"
SHARED_MEMORY = "/dev/shm"
TEMPORARY = "/tmp"
REPORT = "/dev/termination-log"

HTTP_PORT = "http"
HTTP_PORT_NUMBER = 8000
STATUS_PORT = "status"
STATUS_PORT_NUMBER = 9400
PORT_VARIABLE = "INFERSCALE_PORT"
PORT_REFERENCE = f"$({PORT_VARIABLE})"
"""Arguments take the port from the environment, so that it can be changed in one place."""
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Also set by Kubernetes on Indexed Jobs; written out, so that whoever runs the pod sees it."""
