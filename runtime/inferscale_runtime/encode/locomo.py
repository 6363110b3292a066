"""Turns the LoCoMo data set into the encoder's JSON Lines input (docs/input-format.md).

LoCoMo's ``observation`` entries are facts with the turns they came from. Each conversation becomes
one user. Pictures are left out; their turns keep their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from inferscale_runtime.errors import InputError

_SESSION = re.compile(r"session_([1-9]\d*)")
_FIX = "Give the file locomo10.json of the LoCoMo data set, or one of the same shape"


@dataclass(frozen=True, slots=True)
class _Checked:
    """A value of the file with its place in it, for messages."""

    source: str
    value: object
    where: str = ""

    def wrong(self, problem: str) -> InputError:
        return InputError(self.source, 0, self.where, problem, _FIX)

    def items(self) -> Iterator[_Checked]:
        if not isinstance(self.value, list):
            raise self.wrong("is not a list")
        for i, item in enumerate(self.value):
            yield _Checked(self.source, item, f"{self.where}[{i}]")

    def keys(self) -> list[str]:
        if not isinstance(self.value, dict):
            raise self.wrong("is not an object")
        return list(self.value)

    def get(self, key: str) -> _Checked:
        if not isinstance(self.value, dict):
            raise self.wrong("is not an object")
        where = f"{self.where}.{key}".lstrip(".")
        if key not in self.value:
            raise InputError(self.source, 0, where, "is missing", _FIX)
        return _Checked(self.source, self.value[key], where)

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.wrong("is not a string with text")
        return self.value


def convert(path: str) -> Iterator[dict[str, str]]:
    """Makes input lines from a LoCoMo file: for each conversation its turns, then its facts.

    Facts stand in the order of their source turns. One that names several turns gets the first; one
    that names no turn of the conversation gets none and stands last in its session.

    Args:
        path: The JSON file.

    Yields:
        Lines as objects, ready for `json.dumps`.

    Raises:
        InputError: The file cannot be read or is not LoCoMo.
    """
    root = _Checked(path, _load(path))
    users: set[str] = set()
    for conversation in root.items():
        user = conversation.get("sample_id")
        if user.text() in users:
            raise user.wrong("repeats an earlier conversation's id")
        users.add(user.text())
        yield from _conversation(user.text(), conversation)


def _load(path: str) -> object:
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or type(error).__name__}"
        raise InputError(path, 0, "", problem, "Check the path and its permissions") from None
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON at column {error.colno}: {error.msg}"
        raise InputError(path, error.lineno, "", problem, _FIX) from None
    except (ValueError, RecursionError):
        raise InputError(path, 0, "", "is not UTF-8 JSON", _FIX) from None


def _conversation(user: str, conversation: _Checked) -> Iterator[dict[str, str]]:
    talk, observed = conversation.get("conversation"), conversation.get("observation")
    order: dict[str, int] = {}
    times: dict[int, str] = {}
    for number in _sessions(talk, ""):
        times[number] = talk.get(f"session_{number}_date_time").text()
        for turn in talk.get(f"session_{number}").items():
            turn_id = turn.get("dia_id")
            if turn_id.text() in order:
                raise turn_id.wrong("repeats an earlier turn's id")
            order[turn_id.text()] = len(order)
            yield {
                "kind": "turn",
                "user": user,
                "id": turn_id.text(),
                "speaker": turn.get("speaker").text(),
                "text": turn.get("text").text(),
                "time": times[number],
            }
    if not order:
        raise talk.wrong("has no sessions")
    for number in _sessions(observed, "_observation"):
        session = observed.get(f"session_{number}_observation")
        if number not in times:
            raise session.wrong("belongs to a session that the conversation does not have")
        yield from _facts(user, number, session, times[number], order)


def _sessions(block: _Checked, suffix: str) -> list[int]:
    """Numbers of the sessions in a block, ascending; the file's own order is not reliable."""
    matches = (_SESSION.fullmatch(key.removesuffix(suffix)) for key in block.keys())
    return sorted(int(match[1]) for match in matches if match)


def _facts(
    user: str, number: int, session: _Checked, time: str, order: dict[str, int]
) -> list[dict[str, str]]:
    lines: list[tuple[int, dict[str, str]]] = []
    for speaker in session.keys():
        for entry in session.get(speaker).items():
            parts = list(entry.items())
            if len(parts) != 2:
                raise entry.wrong("is not a pair of text and turn id")
            line = {
                "kind": "fact",
                "user": user,
                "id": f"S{number}:F{len(lines) + 1}",
                # The date is in the text because questions ask when, and the text says "today".
                "text": f"{parts[0].text()} ({time})",
                "time": time,
            }
            turn = _first_turn(parts[1])
            if turn in order:
                line["turn"] = turn
            lines.append((order.get(turn, len(order)), line))
    # The file groups by speaker; learning order is the conversation's. The sort is stable.
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _first_turn(reference: _Checked) -> str:
    """The first of the turn ids, which the file writes as one id, a list, or ``"D1:2, D1:5"``."""
    if isinstance(reference.value, list):
        reference = next(reference.items(), _Checked(reference.source, "-", reference.where))
    return re.split(r"[;,]", reference.text())[0].strip()
