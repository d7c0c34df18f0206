r"""Live bytes through one training step: who holds what, the most at once in each phase, and who held it then.

    take(weights) take(activation 1) take(activation 2) give(activation 2) ...
         live ^        ___/‾‾\__
              |    ___/         \____        the peak of a phase is the highest point between its `begin` and the next
              |___/______________________

Both the torch-free step (`step`) and the simulation on meta tensors (`simulate`) write into the same ledger, so they
can be compared line by line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from finetune.allocator import CachingAllocator, Piece, rounded


@dataclass(eq=False, slots=True)
class Block:
    """`size` live bytes of a `bucket`, with a word on `what` they are and the shape behind the number."""

    bucket: str
    what: str
    size: int
    shape: tuple[int, ...] = ()
    width: float = 0.0  # bytes per value
    count: int = 1  # equal blocks that this one stands for
    piece: Piece | None = None
    live: bool = False


@dataclass(slots=True)
class Peak:
    """The most live bytes of one phase: how many, in which operation, and the place in the ledger's history."""

    phase: str
    bytes: int
    during: str = ""
    allocated: int = 0
    at: int = 0
    passing: int = 0


@dataclass
class Ledger:
    """The account. With an `allocator` every entry is replayed there too; `cuda` rounds sizes to 512 bytes."""

    cuda: bool = False
    allocator: CachingAllocator | None = None
    live: int = 0
    peaks: dict[str, Peak] = field(default_factory=dict)
    _history: list[Block] = field(default_factory=list)
    _phase: Peak = field(default_factory=lambda: Peak("load", 0))

    def __post_init__(self) -> None:
        self.peaks[self._phase.phase] = self._phase

    def take(self, block: Block, during: str = "") -> Block:
        """Enter a block. A block that stands for `count` equal ones is rounded once for each."""
        if self.cuda:
            block.size = rounded(block.size)
        self.live += block.size * block.count
        block.live = True
        self._history.append(block)
        if self.allocator is not None and block.size:
            block.piece = self.allocator.take(block.size)
        self._mark(during or block.what)
        return block

    def give(self, block: Block) -> None:
        """Strike a block out."""
        self.live -= block.size * block.count
        block.live = False
        self._history.append(block)
        if self.allocator is not None and block.piece is not None:
            self.allocator.give(block.piece)

    def passing(self, sizes: list[int], during: str) -> None:
        """Bytes that live together inside one kernel and are gone when it returns."""
        sizes = [rounded(size) if self.cuda else size for size in sizes if size]
        if self.allocator is not None:
            for piece in [self.allocator.take(size) for size in sizes]:
                self.allocator.give(piece)
        self._mark(during, sum(sizes))

    def begin(self, phase: str) -> None:
        """Start a phase; its peak starts at what is live now. A phase begun again starts over."""
        self._close()
        if self.allocator is not None:
            self.allocator.restart_peaks()
        self._phase = self.peaks[phase] = Peak(phase, self.live, "", 0, len(self._history))

    def finish(self) -> None:
        """Close the last phase."""
        self._close()

    def _close(self) -> None:
        if self.allocator is not None:
            self._phase.allocated = self.allocator.most_allocated

    def _mark(self, during: str, passing: int = 0) -> None:
        if self.live + passing > self._phase.bytes:
            peak = self._phase
            peak.bytes, peak.during, peak.at, peak.passing = self.live + passing, during, len(self._history), passing

    def mark(self) -> int:
        """A place in the history, for `since`."""
        return len(self._history)

    def since(self, mark: int) -> list[Block]:
        """The blocks entered after a mark that are live now."""
        return [block for block in dict.fromkeys(self._history[mark:]) if block.live]

    @property
    def phase(self) -> str:
        """The phase that runs now."""
        return self._phase.phase

    def peak(self, *phases: str) -> Peak:
        """The highest of the named phases, or of all."""
        return max((self.peaks[name] for name in phases or self.peaks), key=lambda peak: peak.bytes)

    def held(self, peak: Peak) -> Iterator[Block]:
        """The blocks that were live at a peak, in the order they were entered."""
        live: dict[int, Block] = {}
        for block in self._history[: peak.at]:
            if live.pop(id(block), None) is None:
                live[id(block)] = block
        yield from live.values()


def by_bucket(blocks: Iterator[Block]) -> dict[str, int]:
    """Bytes per bucket."""
    totals: dict[str, int] = {}
    for block in blocks:
        totals[block.bucket] = totals.get(block.bucket, 0) + block.size * block.count
    return totals
