"""JSON over HTTP with patience: retries, rate limits, and errors that say what to mend.

Nothing of an answer, of the query or of the token gets into a message.
"""

from __future__ import annotations

import email.utils
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from inferscale_runtime.errors import ConfigError, SourceError

ATTEMPTS = 6
"""Tries of one request that fails (arbitrary): they wait about half a minute in all."""
RATE_ATTEMPTS = 20
"""Tries of one request that is told to slow down; each waits as long as the tool says."""
MAX_WAIT_SECONDS = 300.0
"""Longest wait that a tool may ask for; a job that sleeps longer looks hung."""
MAX_ANSWER_BYTES = 256 << 20

Query = Mapping[str, str | int | bool | Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Token:
    """A secret and where it came from.

    Attributes:
        value: The secret; ``""`` when there is none.
        place: What a message names instead of it.
    """

    value: str
    place: str

    def __repr__(self) -> str:
        return f"Token(place={self.place!r})"


def read_token(path: str | None, flag: str, variable: str) -> Token:
    """Reads a token from a file or, without one, from the environment.

    Args:
        path: The file, or None.
        flag: Name of the flag that names it.
        variable: Name of the environment variable.

    Raises:
        ConfigError: The file cannot be used.
    """
    if path is None:
        value, place = os.environ.get(variable, "").strip(), f"{variable} (or {flag} FILE)"
    else:
        place = f"{flag} '{path}'"
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"{place}: {reason}") from None
        if not value:
            raise ConfigError(f"{place}: it is empty; write the token into it")
    if not value.isascii() or not (value.isprintable() or not value):
        raise ConfigError(f"{place}: it must hold one line of printable ASCII")
    return Token(value, place)


class ToolClient:
    """Asks one tool's API.

    Args:
        tool: Name for messages.
        url: Address of the API, with nothing after the path.
        header: Name of the header that carries the token.
        scheme: What stands before the token in it, with its space.
        token: The token; without one the header is left out.
        sleep: Waits between tries, ``time.sleep`` when None; tests replace it.
    """

    def __init__(
        self,
        tool: str,
        url: str,
        *,
        header: str,
        scheme: str,
        token: Token,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"source {tool}: its URL must read http(s)://HOST[:PORT][/PATH]")
        if "@" in parts.netloc:
            raise ConfigError(f"source {tool}: its URL holds credentials; {token.place} holds them")
        self.tool, self.url = tool, f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._token, self._sleep = token, time.sleep if sleep is None else sleep
        headers = {header: f"{scheme}{token.value}"} if token.value else {}
        # Redirects are not followed: the token belongs to this server.
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(60.0, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def get(self, path: str, query: Query | None = None, *, optional: bool = False) -> Any:
        """A GET; see `request`."""
        return self.request("GET", path, query, None, optional=optional)

    def post(
        self, path: str, body: Any, query: Query | None = None, *, optional: bool = False
    ) -> Any:
        """A POST; see `request`."""
        return self.request("POST", path, query, body, optional=optional)

    def request(
        self, method: str, path: str, query: Query | None, body: Any, *, optional: bool
    ) -> Any:
        """Asks until there is an answer.

        Args:
            method: Of HTTP.
            path: Below the address, already quoted.
            query: Parameters; None values are left out.
            body: Sent as JSON, unless None.
            optional: A 404 gives None.

        Returns:
            The JSON of the answer.

        Raises:
            ConfigError: The tool refuses, or it is not the API that is spoken here.
            SourceError: No whole answer came.
        """
        where = f"{self.tool}: {method} {self.url}{path}"
        params = {key: value for key, value in (query or {}).items() if value is not None}
        faults = slowed = 0
        while True:
            problem, wait = "", 0.0
            try:
                arguments = {"params": params, **({} if body is None else {"json": body})}
                with self._http.stream(method, self.url + path, **arguments) as response:
                    status = response.status_code
                    if status == 429:
                        slowed += 1
                        problem, wait = "HTTP 429", self._told_wait(response, where) or 2.0**slowed
                    elif status == 408 or status >= 500:
                        problem, wait = f"HTTP {status}", self._told_wait(response, where) or 0.0
                    elif status == 404 and optional:
                        return None
                    elif status != 200:
                        raise self._refusal(where, status)
                    else:
                        return _json(response, where)
            except httpx.TransportError as error:
                problem = f"the connection failed ({type(error).__name__})"
            faults += not problem.endswith("429")
            if faults >= ATTEMPTS or slowed >= RATE_ATTEMPTS:
                raise SourceError(
                    f"{where}: {problem}, after {faults + slowed} tries. What was read before "
                    "stays; check that the tool is up and run the same command again"
                )
            self._sleep(min(wait or 2.0 ** (faults - 1), MAX_WAIT_SECONDS))

    def _told_wait(self, response: httpx.Response, where: str) -> float | None:
        """``Retry-After`` in seconds, which may be written as a date."""
        text = response.headers.get("retry-after", "").strip()
        if text.replace(".", "", 1).isdecimal() and text.isascii():
            wait = float(text)
        else:
            try:
                wait = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (TypeError, ValueError):
                return None
        if wait > MAX_WAIT_SECONDS:
            raise SourceError(
                f"{where}: HTTP {response.status_code}, and the tool asks to wait {wait:.0f} s. "
                "Run the same command again after that"
            )
        return max(wait, 0.0)

    def _refusal(self, where: str, status: int) -> ConfigError:
        if status in (401, 403):
            given = "is not accepted" if self._token.value else "is empty, and a token is needed"
            mend = f"{self._token.place} {given}"
        elif 300 <= status < 400:
            mend = "the URL leads elsewhere; name the address that it leads to"
        elif status == 404:
            mend = "there is no such call; check the URL, and docs/sources.md for the version"
        else:
            mend = "check docs/sources.md for the version of the API that is spoken"
        return ConfigError(f"{where}: refused with HTTP {status}: {mend}")


def _json(response: httpx.Response, where: str) -> Any:
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise SourceError(f"{where}: the answer is larger than {MAX_ANSWER_BYTES} bytes")
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{where}: the answer is not JSON, so this is not the API of {where.split(':')[0]}; "
            "check the URL"
        ) from None
