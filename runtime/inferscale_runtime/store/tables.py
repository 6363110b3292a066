"""Facts, turns and segment indexes as Parquet bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inferscale_runtime.store.records import Fact, Segment, Turn

_TEXT = pa.string()
_TEXTS = pa.list_(pa.string())
_TURNS = pa.schema([("id", _TEXT), ("speaker", _TEXT), ("text", _TEXT), ("time", _TEXT)])
_FACTS = pa.schema([("id", _TEXT), ("text", _TEXT), ("turn_id", _TEXT), ("time", _TEXT)])
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
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _from_bytes(data: bytes, schema: Any) -> tuple[Any, Iterable[tuple[Any, ...]]]:
    table = pq.read_table(pa.BufferReader(data))
    columns = [table.column(field.name).cast(field.type).to_pylist() for field in schema]
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
