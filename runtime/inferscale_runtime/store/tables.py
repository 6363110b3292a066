"""Facts, turns and segment indexes as Parquet bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inferscale_runtime.store.records import Fact, Segment, Tombstone, Turn

_TEXT = pa.string()
_TEXTS = pa.list_(pa.string())
_TURNS = pa.schema(
    [("id", _TEXT), ("speaker", _TEXT), ("text", _TEXT), ("time", _TEXT), ("origin", _TEXT)]
)
_FACTS = pa.schema(
    [
        ("id", _TEXT),
        ("text", _TEXT),
        ("turn_id", _TEXT),
        ("time", _TEXT),
        ("origin", _TEXT),
        ("created_at", _TEXT),
        ("updated_at", _TEXT),
    ]
)
_TOMBSTONES = pa.schema([("kind", _TEXT), ("origin", _TEXT), ("digest", _TEXT)])
# Columns that version 1 did not have, and what they are there.
_ADDED: dict[str, str | None] = {"origin": "", "created_at": None, "updated_at": None}
_INDEX = pa.schema(
    [
        ("fact_id", _TEXT),
        ("key", _TEXT),
        ("token_ids", pa.list_(pa.int32())),
        ("context_fact_ids", _TEXTS),
        ("context_turn_ids", _TEXTS),
        ("file", _TEXT),
        ("row", pa.int64()),
        ("crc32", pa.uint32()),
    ]
)


def _table(rows: Sequence[Any], schema: Any) -> Any:
    columns = [
        pa.array([getattr(row, field.name) for row in rows], type=field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _to_bytes(table: Any) -> bytes:
    sink = io.BytesIO()
    # Numbers of embeddings repeat too seldom for dictionaries or compression, which take most of
    # the time of a write (measured: 256 rows of 384 numbers in 1.3 instead of 6.5 ms).
    packed = {name: "zstd" for name in table.column_names if name != "embedding"}
    pq.write_table(table, sink, compression=packed, use_dictionary=False)
    return sink.getvalue()


def _from_bytes(data: bytes, schema: Any) -> tuple[Any, Iterable[tuple[Any, ...]]]:
    table = pq.read_table(pa.BufferReader(data))
    columns = [
        [_ADDED[field.name]] * table.num_rows
        if field.name in _ADDED and field.name not in table.column_names
        else table.column(field.name).cast(field.type).to_pylist()
        for field in schema
    ]
    return table, zip(*columns, strict=True)


def facts_to_bytes(facts: Sequence[Fact], embeddings: npt.NDArray[np.float32]) -> bytes:
    """Returns the table of facts; embeddings of width 0 leave their column out."""
    table = _table(facts, _FACTS)
    width = embeddings.shape[1]
    if width:
        flat = np.ascontiguousarray(embeddings, dtype=np.float32).reshape(-1)
        column = pa.FixedSizeListArray.from_arrays(pa.array(flat), width)
        table = table.append_column("embedding", column)
    return _to_bytes(table)


def facts_from_bytes(data: bytes) -> tuple[tuple[Fact, ...], npt.NDArray[np.float32]]:
    """Reads what :func:`facts_to_bytes` wrote."""
    table, rows = _from_bytes(data, _FACTS)
    facts = tuple(Fact(*row) for row in rows)
    if "embedding" not in table.column_names:
        return facts, np.zeros((len(facts), 0), np.float32)
    column = table.column("embedding").combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return facts, np.array(flat, np.float32).reshape(len(facts), column.type.list_size)


def turns_to_bytes(turns: Sequence[Turn]) -> bytes:
    """Returns the table of turns."""
    return _to_bytes(_table(turns, _TURNS))


def turns_from_bytes(data: bytes) -> tuple[Turn, ...]:
    """Reads what :func:`turns_to_bytes` wrote."""
    return tuple(Turn(*row) for row in _from_bytes(data, _TURNS)[1])


def tombstones_to_bytes(tombstones: Iterable[Tombstone]) -> bytes:
    """Returns the table of tombstones, in an order that depends on nothing else."""
    return _to_bytes(_table(sorted(tombstones), _TOMBSTONES))


def tombstones_from_bytes(data: bytes) -> frozenset[Tombstone]:
    """Reads what :func:`tombstones_to_bytes` wrote."""
    return frozenset(Tombstone(*row) for row in _from_bytes(data, _TOMBSTONES)[1])


def index_to_bytes(segments: Sequence[Segment]) -> bytes:
    """Returns the table of one fingerprint's segments."""
    return _to_bytes(_table(segments, _INDEX))


def index_from_bytes(data: bytes) -> dict[str, Segment]:
    """Reads what :func:`index_to_bytes` wrote, by fact id."""
    found = {}
    for fact, key, tokens, facts, turns, file, row, crc in _from_bytes(data, _INDEX)[1]:
        found[fact] = Segment(
            fact, key, tuple(tokens), tuple(facts), tuple(turns), file, int(row), int(crc)
        )
    return found
