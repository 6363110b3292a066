"""Token buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscale_runtime.server.auth.limits import TokenBuckets


@given(
    per_minute=st.integers(1, 10_000),
    burst=st.integers(1, 50),
    pauses=st.lists(st.floats(0, 120), max_size=200),
)
def test_never_more_than_the_rate_allows_and_waiting_helps(
    per_minute: int, burst: int, pauses: list[float]
) -> None:
    now = 0.0
    buckets = TokenBuckets(per_minute, burst, lambda: now)
    taken = 0
    for pause in pauses:
        now += pause
        wait = buckets.take("a")
        if not wait:
            taken += 1
        else:
            now += wait + 1e-6
            assert buckets.take("a") == 0
            taken += 1
        assert taken <= burst + now * per_minute / 60 + 1e-3


def test_names_do_not_share() -> None:
    buckets = TokenBuckets(1, 1, lambda: 0.0)
    assert [buckets.take("a"), buckets.take("b")] == [0, 0]
    assert buckets.take("a") == 60
