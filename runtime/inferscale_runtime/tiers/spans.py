"""Free rows of a slab (pure): first fit in one piece, else several."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

Span = tuple[int, int]
"""``(first row, rows)``."""


class FreeSpans:
    """Which rows are free, as sorted pieces that never touch each other.

    Args:
        num_rows: Rows of the slab; all are free at first.
    """

    def __init__(self, num_rows: int) -> None:
        self._spans: list[Span] = [(0, num_rows)] if num_rows else []
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def take(self, rows: int) -> tuple[Span, ...] | None:
        """Takes rows: one piece when some piece is large enough, else the largest pieces.

        A segment in pieces costs a few more entries in its claim; it keeps a full slab usable
        without moving what requests hold.

        Returns:
            The pieces, or None (and nothing is taken) when fewer rows are free.
        """
        if rows > self.num_rows:
            return None
        for index, (start, size) in enumerate(self._spans):
            if size >= rows:
                return (self._cut(index, start, size, rows),)
        taken: list[Span] = []
        for start, size in sorted(self._spans, key=lambda span: -span[1]):
            index = bisect.bisect_left(self._spans, (start, 0))
            taken.append(self._cut(index, start, size, min(size, rows)))
            rows -= taken[-1][1]
            if not rows:
                break
        return tuple(sorted(taken))

    def _cut(self, index: int, start: int, size: int, rows: int) -> Span:
        rest = [(start + rows, size - rows)] if size > rows else []
        self._spans[index : index + 1] = rest
        self.num_rows -= rows
        return start, rows

    def give(self, spans: tuple[Span, ...]) -> None:
        """Gives pieces back and joins them with their free neighbours."""
        for start, rows in spans:
            self.num_rows += rows
            index = bisect.bisect_left(self._spans, (start, 0))
            begin, size = start, rows
            upto = index
            if upto < len(self._spans) and self._spans[upto][0] == start + rows:
                size += self._spans[upto][1]
                upto += 1
            if index and sum(self._spans[index - 1]) == start:
                index -= 1
                begin, size = self._spans[index][0], size + self._spans[index][1]
            self._spans[index:upto] = [(begin, size)]
