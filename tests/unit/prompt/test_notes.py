"""Notes keep every prompt of a chat the beginning of the next one."""

from __future__ import annotations

from typing import Any

from inferscale_runtime.prompt.notes import insert_notes, turn_keys, write_note

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Hello"},
]


def test_places_are_user_messages_and_keep_their_names() -> None:
    keys = turn_keys(CHAT)
    assert [index for index, _ in keys] == [1, 3]
    # Equal messages at two places are two places.
    assert keys[0][1] != keys[1][1]
    longer = [*CHAT, {"role": "assistant", "content": "?"}, {"role": "user", "content": "Bye"}]
    assert turn_keys(longer)[:2] == keys


def test_a_change_before_a_place_makes_it_another() -> None:
    changed = [{"role": "system", "content": "Be curt."}, *CHAT[1:]]
    assert not {key for _, key in turn_keys(changed)} & {key for _, key in turn_keys(CHAT)}


def test_notes_stand_in_front_of_their_message_only() -> None:
    note = write_note("Also known:\n", "- {text}\n", ["a {text}", "b"])
    assert note == "Also known:\n- a {text}\n- b\n\n"
    before = [dict(message) for message in CHAT]
    noted = insert_notes(CHAT, {3: note})
    assert noted[:3] == CHAT[:3]
    assert noted[3]["content"] == note + "Hello"
    assert before == CHAT
