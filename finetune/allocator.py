"""CUDA's caching allocator replayed on a CPU: what torch reserves and rounds up beyond the bytes it was asked for.

The rules are those of torch's `CUDACachingAllocator` with its default settings (c10/cuda/CUDACachingAllocator.cpp):

    request          pool    segment asked of the driver        a free block is split when the rest is
    up to 1 MiB      small   2 MiB                              at least 512 bytes
    below 10 MiB     large   20 MiB                             above 1 MiB
    larger           large   rounded up to 2 MiB                above 1 MiB

Sizes are rounded up to 512 bytes; the smallest free block that is large enough is taken, the lowest address first;
neighbours that are free become one block again, and segments are kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ROUND = 512
_MIB = 2**20
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
_SEGMENT_STEP = 2 * _MIB
_GAP = 2**40  # between segments, so that no two of them touch


def rounded(size: int) -> int:
    """Bytes that the allocator counts for a request of `size` bytes."""
    return -(-size // ROUND) * ROUND


@dataclass(eq=False, slots=True)
class Piece:
    """A stretch of a segment, in use or free."""

    address: int
    size: int
    small: bool
    used: bool = False
    before: Piece | None = None
    after: Piece | None = None


class CachingAllocator:
    """One stream's allocator. `allocated` and `reserved` are bytes now, `most_*` the peaks since `restart_peaks`."""

    def __init__(self) -> None:
        self._free: dict[bool, list[tuple[int, int, Piece]]] = {True: [], False: []}
        self._next = 0
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0

    def take(self, size: int) -> Piece:
        """Allocate `size` bytes, from a free piece or a new segment."""
        size = rounded(max(size, 1))
        small = size <= _SMALL
        piece = self._fitting(size, small) or self._segment(size, small)
        rest = piece.size - size
        if rest >= ROUND if small else rest > _SMALL:
            tail = Piece(piece.address + size, rest, small, before=piece, after=piece.after)
            if piece.after is not None:
                piece.after.before = tail
            piece.after, piece.size = tail, size
            self._keep(tail)
        piece.used = True
        self.allocated += piece.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return piece

    def give(self, piece: Piece) -> None:
        """Free a piece and join it with free neighbours."""
        self.allocated -= piece.size
        piece.used = False
        if (before := piece.before) is not None and not before.used:
            self._drop(before)
            piece = self._joined(before, piece)
        if (after := piece.after) is not None and not after.used:
            self._drop(after)
            piece = self._joined(piece, after)
        self._keep(piece)

    def restart_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats` does."""
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def _fitting(self, size: int, small: bool) -> Piece | None:
        pool = self._free[small]
        at = bisect_left(pool, (size,))
        return pool.pop(at)[2] if at < len(pool) else None

    def _segment(self, size: int, small: bool) -> Piece:
        if small:
            length = _SMALL_SEGMENT
        else:
            length = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
        self._next -= _GAP  # the driver hands out falling addresses
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)
        return Piece(self._next, length, small)

    @staticmethod
    def _joined(left: Piece, right: Piece) -> Piece:
        left.size += right.size
        left.after = right.after
        if left.after is not None:
            left.after.before = left
        return left

    def _keep(self, piece: Piece) -> None:
        insort(self._free[piece.small], (piece.size, piece.address, piece))

    def _drop(self, piece: Piece) -> None:
        pool = self._free[piece.small]
        pool.pop(bisect_left(pool, (piece.size, piece.address)))


__all__ = ["ROUND", "CachingAllocator", "Piece", "rounded"]
