"""The chats of ``inferscale bench session``."""

from __future__ import annotations

from inferscale_runtime.bench.client import Answer, Ask
from inferscale_runtime.bench.session import WAYS, _row, later_note, one_user_a_chat
from inferscale_runtime.bench.workload import synthetic_workload


def test_each_way_has_its_own_user_with_the_same_facts() -> None:
    single = synthetic_workload(0, users=3, facts=4, questions=2)
    workload = one_user_a_chat(single, 2)
    assert len(workload.users) == len(set(workload.users)) == 2 * len(WAYS)
    for user in workload.users:
        origin = next(name for name in single.users if user.startswith(f"{name}-"))
        texts = [line["text"] for line in workload.lines if line["user"] == user]
        assert texts == [line["text"] for line in single.lines if line["user"] == origin]
        assert workload.questions[user] == single.questions[origin]


def test_a_turn_carries_session_and_history() -> None:
    history = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    body = Ask("maya", "c", 5, "text", session="s", history=history).body("m")
    assert [m["content"] for m in body["messages"]] == ["a", "b", "c"]
    assert body["memory"] == {"user": "maya", "k": 5, "mode": "text", "session": "s"}
    assert "session" not in Ask("maya", "c", 5, "text").body("m")["memory"]


def test_computed_tokens_are_those_that_were_not_cached() -> None:
    def answer(cached: int, seconds: float) -> Answer:
        return Answer(seconds, 1.0, 100, {"facts": 3}, cached)

    answers = {way: [answer(90, 0.1), answer(60, 0.3), answer(80, 0.2)] for way, _ in WAYS}
    answers["fresh"] = [answer(10, 0.8)] * 3
    row = _row(1, answers)
    assert (row["session_computed_tokens"], row["fresh_computed_tokens"]) == (20, 90)
    assert (row["session_p50_ms"], row["fresh_per_session"]) == (200.0, 4.0)
    assert "session 0.20 s, 20 tokens computed" in later_note([row, {**row, "turn": 2}])
