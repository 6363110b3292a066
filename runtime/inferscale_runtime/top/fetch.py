"""Asks the pods for their status (I/O)."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from inferscale_runtime.errors import ConfigError

STATUS_PATH = "/inferscale/v1/status"
MAX_STATUS_BYTES = 4 << 20
MAX_PODS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """What one pod said.

    Attributes:
        pod: Host and port.
        taken_at: Monotonic seconds.
        document: The status, empty when there is none.
        problem: Why there is none, or ``""``.
    """

    pod: str
    taken_at: float
    document: dict[str, Any]
    problem: str = ""


def check_url(text: str) -> str:
    """A base URL without a trailing slash.

    Raises:
        ConfigError: When it is no HTTP URL.
    """
    parts = urllib.parse.urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url '{text}': give a URL such as http://127.0.0.1:8000")
    return text.rstrip("/")


def expand(url: str) -> list[str]:
    """One URL for each address behind the host name: the pods of a headless Service.

    Raises:
        ConfigError: When the name does not resolve.
    """
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--url '{url}': the host name is not known ({error})") from error
    addresses = sorted({str(entry[4][0]) for entry in found})
    hosts = [f"[{address}]" if ":" in address else address for address in addresses]
    return [parts._replace(netloc=f"{host}:{port}").geturl() for host in hosts]


def fetch_all(urls: Sequence[str], api_key: str, timeout: float) -> list[Answer]:
    """Asks every pod at once.

    Args:
        urls: Base URLs.
        api_key: Sent as bearer token; empty sends none.
        timeout: Seconds for each.
    """
    with ThreadPoolExecutor(max_workers=min(len(urls), MAX_PODS)) as pool:
        return list(pool.map(lambda url: _fetch(url, api_key, timeout), urls))


def _fetch(url: str, api_key: str, timeout: float) -> Answer:
    pod = urllib.parse.urlsplit(url).netloc.rpartition("@")[2]
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url + STATUS_PATH, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            document = json.loads(response.read(MAX_STATUS_BYTES))
    except urllib.error.HTTPError as error:
        return Answer(pod, time.monotonic(), {}, f"HTTP {error.code}")
    except urllib.error.URLError as error:
        return Answer(pod, time.monotonic(), {}, str(error.reason))
    except (OSError, http.client.HTTPException) as error:
        return Answer(pod, time.monotonic(), {}, str(error) or type(error).__name__)
    except ValueError:
        return Answer(pod, time.monotonic(), {}, "the answer is no JSON")
    if not isinstance(document, dict):
        return Answer(pod, time.monotonic(), {}, "the answer is no status document")
    return Answer(pod, time.monotonic(), document)
