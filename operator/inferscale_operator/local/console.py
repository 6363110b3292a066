"""What ``inferscale up`` prints: conditions as they change, logs with prefixes, the curl line."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from inferscale_operator.desired.kinds import Manifest

QUESTION = "What do you know about me?"
ANY_USER = "USER"
_NO_USER = f"put one of your users for {ANY_USER}"


def user_of(config_map: Manifest | None, key: str | None) -> str | None:
    """A user whose facts are in a ConfigMap; None when none can be read.

    Args:
        config_map: The source.
        key: Its key; None for all that end in ``.jsonl``.
    """
    for name, text in sorted(((config_map or {}).get("data") or {}).items()):
        if name != key and not (key is None and name.endswith(".jsonl")):
            continue
        for line in text.splitlines():
            try:
                user = json.loads(line).get("user")
            except (ValueError, AttributeError):
                continue
            if isinstance(user, str):
                return user
    return None


def curl_line(
    model: str,
    port: int,
    user: str,
    store: str | None = None,
    key_file: str | None = None,
    token: bool = False,
) -> str:
    """A line for the shell that asks a question about a user's memory.

    Args:
        model: Name of the PersonalizedModel.
        port: Port of loopback.
        user: A user of its stores.
        store: Which store, where there are several.
        key_file: File with the API key, where one is needed.
        token: The caller has credentials of its own, and puts them into ``TOKEN``.
    """
    memory = {"user": user} | ({"store": store} if store else {})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 100,
        "temperature": 0,
        "memory": memory,
    }
    words = ["curl", "-s", f"http://127.0.0.1:{port}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json"]
    line = shlex.join(words)
    if key_file is not None:
        # The key itself is printed nowhere.
        line += f' -H "Authorization: Bearer $(cat {shlex.quote(key_file)})"'
    elif token:
        line += ' -H "Authorization: Bearer $TOKEN"'
    return f"{line} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"


class Console:
    """Prints lines, each condition when it changes.

    Args:
        stream: Where to.
        logs: Whether lines of pods are printed.
        quiet: Whether only what is ready, and problems, are printed.
        clock: Local time.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        logs: bool = False,
        quiet: bool = False,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._stream = stream or sys.stdout
        self._logs = logs
        self._quiet = quiet
        self._clock = clock
        self._shown: dict[tuple[str, str, str], dict[str, str]] = {}

    def say(self, text: str) -> None:
        """A line with the time."""
        self._write(f"{self._clock():%H:%M:%S}  {text}")

    def detail(self, text: str) -> None:
        """A line that ``--quiet`` leaves out."""
        if not self._quiet:
            self.say(text)

    def plain(self, text: str) -> None:
        """A line to be copied."""
        self._write(text)

    def log(self, pod: str, line: str) -> None:
        """A line of a pod."""
        if self._logs:
            self._write(f"{pod} | {line}")

    def conditions(self, resource: Manifest) -> None:
        """Prints the conditions that changed since they were printed last."""
        metadata = resource["metadata"]
        key = (resource["kind"], metadata["namespace"], metadata["name"])
        before, now = self._shown.get(key, {}), _condition_texts(resource)
        for name, text in now.items():
            if text != before.get(name):
                say = self.say if name == "Ready" else self.detail
                say(f"{resource['kind']}/{metadata['name']}  {name}={text}")
        self._shown[key] = now

    def gone(self, resource: Manifest) -> None:
        """A resource was deleted."""
        metadata = resource["metadata"]
        self._shown.pop((resource["kind"], metadata["namespace"], metadata["name"]), None)
        self.say(f"{resource['kind']}/{metadata['name']}  deleted")

    def _write(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            return  # the reader has gone; the pods are what matters


def _condition_texts(resource: Manifest) -> dict[str, str]:
    conditions = (resource.get("status") or {}).get("conditions") or []
    texts = {}
    for item in conditions:
        message = item.get("message", "")
        # Ready repeats the first condition that does not hold.
        others = {other.get("message", "") for other in conditions if other is not item}
        said = item["type"] == "Ready" and message in others
        tail = f": {message}" if message and not said else ""
        texts[item["type"]] = f"{item['status']} {item['reason']}{tail}"
    return texts


def readiness_note(user: str | None) -> str:
    """What to do before the curl line can be used."""
    return "" if user is not None else f" ({_NO_USER})"
