from __future__ import annotations

from inferscale_operator.acting import early_pauses


def test_comparisons_come_soon_and_then_less_and_less_often() -> None:
    assert [*early_pauses(120.0)] == [2, 4, 8, 16, 32, 64]
    assert [*early_pauses(2.0)] == []
