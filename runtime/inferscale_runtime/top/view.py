"""From status documents to text (pure). Rates are over the time since the answer before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_runtime.top.fetch import Answer

Row = tuple[str, ...]

_UNITS = ("B", "Ki", "Mi", "Gi", "Ti", "Pi")
_POD_HEADER = ("POD", "DRAM", "PINNED", "HIT %", "SEG/S", "STAGED/S", "EVICTED", "PLAN", "STATE")
_STORE_HEADER = ("POD", "STORE", "TIER", "USED", "FLOOR", "CEILING", "SEGMENTS", "HIT %", "HEAT")
_ARENA_HEADER = ("POD", "GPU ARENA", "HIT %", "COPIED/S", "EVICTED")
_GPU_HEADER = ("POD", "GPU", "NAME", "USED", "TOTAL", "FREE", "PROCESSES", "AGE S")


def format_size(value: Any) -> str:
    """Bytes in at most four digits and a unit; ``-`` for what is not known."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    size, unit = float(value), 0
    while abs(size) >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f}{_UNITS[unit]}" if unit == 0 or size >= 100 else f"{size:.1f}{_UNITS[unit]}"


def render(answers: Sequence[Answer], previous: Mapping[str, Answer], width: int) -> str:
    """The whole screen.

    Args:
        answers: Of this round.
        previous: By pod, of the round before.
        width: Columns; longer lines are cut.
    """
    pods: list[Row] = [_POD_HEADER]
    stores: list[Row] = [_STORE_HEADER]
    arenas: list[Row] = [_ARENA_HEADER]
    gpus: list[Row] = [_GPU_HEADER]
    for answer in answers:
        before = previous.get(answer.pod)
        pods.append(_pod_row(answer, before))
        stores += _store_rows(answer, before)
        arenas += _arena_rows(answer, before)
        gpus += _gpu_rows(answer)
    tables = [_table(rows) for rows in (pods, stores, arenas, gpus) if len(rows) > 1]
    lines = [line for table in tables for line in (*table, "")][:-1]
    return "\n".join(line[:width].rstrip() for line in lines)


def _pod_row(answer: Answer, before: Answer | None) -> Row:
    if answer.problem:
        return (answer.pod, *("-",) * 7, f"no answer: {answer.problem}")
    tiers = _mapping(answer.document, "tiers")
    dram, plan = _mapping(tiers, "dram"), _mapping(tiers, "plan")
    names = ("hits", "misses", "staged_bytes")
    now = {name: _sum(answer, name) for name in names}
    since = {name: now[name] - (_sum(before, name) if before else 0) for name in names}
    if min(since.values()) < 0:  # the pod has restarted
        since, before = now, None
    seconds = answer.taken_at - before.taken_at if before else 0.0
    asked = since["hits"] + since["misses"]
    return (
        answer.pod,
        f"{format_size(dram.get('used_bytes'))}/{format_size(dram.get('budget_bytes'))}",
        format_size(dram.get("pinned_bytes")),
        _percent(since["hits"], asked),
        f"{asked / seconds:.1f}" if seconds > 0 else "-",
        format_size(since["staged_bytes"] / seconds) if seconds > 0 else "-",
        str(dram.get("evictions", "-")),
        _plan_text(plan),
        str(answer.document.get("reason") or "ok"),
    )


def _plan_text(plan: Mapping[str, Any]) -> str:
    if not plan.get("file"):
        return "none"
    return f"kept: {plan['reason']}" if plan.get("reason") else "ok"


def _store_rows(answer: Answer, before: Answer | None) -> list[Row]:
    old = _stores(before) if before else {}
    rows: list[Row] = []
    for name, values in _stores(answer).items():
        hits = _count(values, "hits") - _count(old.get(name, {}), "hits")
        misses = _count(values, "misses") - _count(old.get(name, {}), "misses")
        if hits < 0 or misses < 0:
            hits, misses = _count(values, "hits"), _count(values, "misses")
        heat = values.get("heat")
        rows.append(
            (
                answer.pod,
                name or "(preamble)",
                str(values.get("tier", "-")),
                format_size(values.get("used_bytes")),
                format_size(values.get("floor_bytes")),
                format_size(values.get("ceiling_bytes")),
                str(values.get("segments", "-")),
                _percent(hits, hits + misses),
                f"{heat:.2f}" if isinstance(heat, int | float) else "-",
            )
        )
    return rows


def _arena_rows(answer: Answer, before: Answer | None) -> list[Row]:
    """The GPU arena, per GPU; nothing for a pod without one."""
    now = _mapping(_mapping(answer.document, "tiers"), "gpu")
    if not now:
        return []
    old = _mapping(_mapping(before.document, "tiers"), "gpu") if before else {}
    names = ("hits", "misses", "copied_bytes")
    since = {name: _count(now, name) - _count(old, name) for name in names}
    if min(since.values()) < 0:  # the pod has restarted
        since, before = {name: _count(now, name) for name in names}, None
    seconds = answer.taken_at - before.taken_at if before else 0.0
    return [
        (
            answer.pod,
            f"{format_size(now.get('used_bytes'))}/{format_size(now.get('budget_bytes'))}",
            _percent(since["hits"], since["hits"] + since["misses"]),
            format_size(since["copied_bytes"] / seconds) if seconds > 0 else "-",
            str(now.get("evictions", "-")),
        )
    ]


def _gpu_rows(answer: Answer) -> list[Row]:
    gpu = _mapping(answer.document, "gpu")
    if not gpu:
        return []
    if not gpu.get("up"):
        return [(answer.pod, "-", f"no figures: {gpu.get('reason')}", *("-",) * 5)]
    age = gpu.get("age_seconds")
    devices = gpu.get("devices")
    return [
        (
            answer.pod,
            str(device.get("device")),
            str(device.get("name")) + (f" ({device['reason']})" if device.get("reason") else ""),
            *(format_size(device.get(f"{kind}_bytes")) for kind in ("used", "total", "free")),
            str(len(device.get("processes") or ())),
            f"{age:.0f}" if isinstance(age, int | float) else "-",
        )
        for device in (devices if isinstance(devices, list) else [])
        if isinstance(device, dict)
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    # Names and reasons come over the network: nothing may steer the terminal.
    clean = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in clean) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True))
        for row in clean
    ]


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    return value if isinstance(value, Mapping) else {}


def _stores(answer: Answer) -> dict[str, Mapping[str, Any]]:
    found = _mapping(_mapping(answer.document, "tiers"), "stores")
    return {str(name): values for name, values in found.items() if isinstance(values, Mapping)}


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _sum(answer: Answer, name: str) -> int:
    return sum(_count(values, name) for values in _stores(answer).values())


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
