from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.store import parts
from inferscale_runtime.store.parts import plan_parts
from inferscale_runtime.store.records import Fact


def facts(*ids):
    return tuple(Fact(f"f{i}", f"text {i}") for i in ids)


def cut(new, old):
    return [
        (part.kept, new[part.start : part.end])
        for part in plan_parts(new, [(f"old{n}", rows) for n, rows in enumerate(old)])
    ]


def test_small_changes_rewrite_small_tables(monkeypatch):
    monkeypatch.setattr(parts, "PART_FACTS", 4)
    a, b, c = facts(0, 1, 2, 3), facts(4, 5, 6, 7), facts(8, 9)
    assert cut(facts(), []) == [(None, ())]
    assert cut(a + b + c, []) == [(None, a), (None, b), (None, c)]
    assert cut(a + b + c, [a, b, c]) == [("old0", a), ("old1", b), ("old2", c)]
    more = c + facts(10)
    assert cut(a + b + more, [a, b, c]) == [("old0", a), ("old1", b), (None, more)]
    assert cut(a + b[1:] + c, [a, b, c]) == [("old0", a), (None, b[1:]), ("old2", c)]
    longer = a + facts(20)
    assert cut(longer + b, [a, b]) == [("old0", a), (None, facts(20)), ("old1", b)]
    changed = (Fact("f4", "other"), *b[1:])
    assert cut(a + changed + c, [a, b, c]) == [("old0", a), (None, changed), ("old2", c)]
    small = b[:1] + c[:1]
    assert cut(a + small, [a, b, c]) == [("old0", a), (None, small)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=6),
    st.lists(st.integers(0, 60), unique=True, max_size=50),
)
def test_parts_cover_all_facts_in_order(old, ids):
    seen, tables = set(), []
    for table in old:
        tables.append(facts(*dict.fromkeys(i for i in table if i not in seen)))
        seen |= {*table}
    new = facts(*ids)
    found = plan_parts(new, list(enumerate(tables)))
    assert [f for part in found for f in new[part.start : part.end]] == list(new)
    for part in found:
        if part.kept is not None:
            assert tables[part.kept] == new[part.start : part.end]
