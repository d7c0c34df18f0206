"""Rows that are nearly the same, found among millions without comparing each with each.

    row     a b c d e f g      shingles of five tokens   abcde bcdef cdefg
    other   a b c d e f x                                abcde bcdef cdefx      Jaccard 2 / 4 = 0.5

MinHash (Broder 1997): under a random order of all shingles, the first one of two rows is the same with a probability
equal to their Jaccard similarity J. 126 orders in 21 bands of 6: two rows meet when they agree in a whole band, which
they do with probability 1 - (1 - J^6)^21, that is 99.8 % at J = 0.8, 99.99999 % at 0.9 and 28 % at 0.5. Those that
meet and agree in enough of all 126 are then compared shingle by shingle, so no pair is reported that isn't one. Same
rows, same answer.

A million rows of 200 tokens take about 350 MB beside the rows themselves, and less than a minute on one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

SHINGLE = 5  # tokens
BANDS, DEPTH = 21, 6
NEIGHBOURS = 4  # with which a row of a large group is compared, beside the earliest
MOST = 500_000  # pairs that are compared; a data set of near copies only has more
_SLACK = (
    0.12  # 126 orders estimate a similarity of 0.8 to 0.036; what lies more than three times that below is no pair
)
_AT_ONCE = 1 << 16  # tokens; their hashes stay in the processor's cache


Ids = Any  # a row's token ids: a list or an array


class Rows(Protocol):
    """Rows of token ids that can be asked for again."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Ids: ...


@dataclass(frozen=True)
class Near:
    """Pairs (i, j, Jaccard) with i < j, or for `across` the i-th trained and the j-th held-out row.

    Of many rows that resemble each other, each is compared with the earliest and with its neighbours, so not every
    pair is there. `complete` is False when even so there were too many to compare all: then there are more.
    """

    pairs: list[tuple[int, int, float]]
    complete: bool = True

    @property
    def copies(self) -> int:
        """Rows that have a near copy before them (for `across`, among the trained ones)."""
        return len({j for _, j, _ in self.pairs})


def near_pairs(rows: Rows, threshold: float = 0.8) -> Near:
    """Pairs of rows whose shingles have a Jaccard similarity of at least `threshold`."""
    return _search(rows, threshold, None)


def across(train: Rows, held: Rows, threshold: float = 0.8) -> Near:
    """Pairs of a trained and a held-out row that are at least so similar: what leaks from one into the other."""
    found = _search(_Joined(train, held), threshold, len(train))
    return Near([(i, j - len(train), similar) for i, j, similar in found.pairs], found.complete)


def digest(ids: Ids) -> int:
    """64 bits that tell equal rows from others."""
    import numpy as np

    return int.from_bytes(blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=8).digest(), "little")


def shingles(ids: Ids) -> Hashes:
    """The row's different shingles as sorted 64-bit hashes; a shorter row is one shingle."""
    import numpy as np

    hashes, _ = _shingles([ids])
    return np.unique(hashes)


def jaccard(one: Hashes, other: Hashes) -> float:
    """Shared shingles / all shingles of both."""
    import numpy as np

    shared = np.intersect1d(one, other, assume_unique=True).size
    return float(shared / (one.size + other.size - shared))


# ------------------------------------------------------------------------------------------------------------- search


class _Joined:
    """Two sets of rows one after the other."""

    def __init__(self, first: Rows, second: Rows) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, index: int, /) -> Ids:
        before = len(self.first)
        return self.first[index] if index < before else self.second[index - before]


def _search(rows: Rows, threshold: float, border: int | None) -> Near:
    if len(rows) < 2:
        return Near([])
    candidates, complete = _candidates(*_sketch(rows), border, threshold - _SLACK)

    @lru_cache(maxsize=4096)
    def of(index: int) -> Hashes:
        return shingles(rows[index])

    pairs = []
    for code in candidates.tolist():
        i, j = divmod(code, len(rows))
        if (similar := jaccard(of(i), of(j))) >= threshold:
            pairs.append((i, j, similar))
    return Near(pairs, complete)


def _candidates(keys: Hashes, marks: Any, border: int | None, least: float) -> tuple[Any, bool]:
    """Sorted codes i * rows + j of the pairs that agree in a band and in a share of at least `least` of all orders,
    and whether these are all; else they are those that agree most."""
    import numpy as np

    count, complete = keys.shape[1], True
    codes, shares = np.empty(0, np.int64), np.empty(0, np.uint8)
    for number, band in enumerate(keys):
        # Rows that agree stand together, and those that agree in the next band too are neighbours.
        order = np.lexsort((keys[(number + 1) % BANDS], band))
        fresh, agree = [codes], [shares]
        for i, j in _met(order, band[order], border):
            for at in range(0, i.size, _AT_ONCE):
                one, other = i[at : at + _AT_ONCE], j[at : at + _AT_ONCE]
                share = (marks[one] == marks[other]).sum(axis=1, dtype=np.uint8)
                near = share >= least * BANDS * DEPTH
                fresh.append(one[near] * count + other[near])
                agree.append(share[near])
        codes, firsts = np.unique(np.concatenate(fresh), return_index=True)
        shares = np.concatenate(agree)[firsts]
        if codes.size > MOST:
            best = np.sort(np.argsort(shares, kind="stable")[-MOST:])
            codes, shares, complete = codes[best], shares[best], False
    return codes, complete


def _met(order: Any, keys: Hashes, border: int | None) -> Iterator[tuple[Any, Any]]:
    """Rows i < j of one group: each with the earliest of its group, and with those before it in `order`."""
    import numpy as np

    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    earliest = np.repeat(np.minimum.reduceat(order, begins), np.diff(np.append(begins, order.size)))
    pairs = [(earliest, order)]
    for lag in range(1, NEIGHBOURS + 1):
        same = keys[lag:] == keys[:-lag]
        one, other = order[:-lag][same], order[lag:][same]
        pairs.append((np.minimum(one, other), np.maximum(one, other)))
    for i, j in pairs:
        wanted = i < j if border is None else (i < border) & (j >= border)
        yield i[wanted], j[wanted]


def _sketch(rows: Rows) -> tuple[Hashes, Any]:
    """One key for each band and row, (BANDS, rows), and a byte for each row and order, (rows, BANDS * DEPTH)."""
    import numpy as np

    random = np.random.Generator(np.random.PCG64(126))
    factors = random.integers(0, 1 << 32, BANDS * DEPTH, dtype=np.uint32) | np.uint32(1)
    offsets = random.integers(0, 1 << 32, BANDS * DEPTH, dtype=np.uint32)
    keys = np.zeros((BANDS, len(rows)), np.uint64)
    marks = np.zeros((len(rows), BANDS * DEPTH), np.uint8)
    begin = 0
    for block in _blocks(rows):
        hashes, starts = _shingles(block)
        short = (hashes >> np.uint64(32)).astype(np.uint32)
        moved, end = np.empty_like(short), begin + len(block)
        for number, (factor, offset) in enumerate(zip(factors, offsets, strict=True)):
            np.multiply(short, factor, out=moved)
            np.add(moved, offset, out=moved)
            first = np.minimum.reduceat(moved, starts)
            into = keys[number // DEPTH, begin:end]
            into *= np.uint64(0x9E3779B97F4A7C15)
            into += first
            into ^= into >> np.uint64(29)
            marks[begin:end, number] = first * factor >> np.uint32(24)  # mixed again: the smallest differ in low bits
        begin = end
    return keys, marks


def _blocks(rows: Rows) -> Iterator[list[Ids]]:
    block: list[Ids] = []
    size = 0
    for index in range(len(rows)):
        block.append(rows[index])
        size += len(block[-1])
        if size >= _AT_ONCE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _shingles(block: Sequence[Ids]) -> tuple[Hashes, Any]:
    """The hashes of all shingles of a block of rows, one row after the other, and where each row's begin."""
    import numpy as np

    padded = [np.asarray(row, dtype=np.int64) for row in block]
    padded = [row if len(row) >= SHINGLE else np.append(row, [-2] * (SHINGLE - len(row))) for row in padded]
    lengths = np.array([len(row) for row in padded])
    ends, flat = np.cumsum(lengths), np.concatenate(padded).astype(np.uint64)
    random = np.random.Generator(np.random.PCG64(5))
    size = flat.size - SHINGLE + 1
    hashes = np.zeros(size, np.uint64)
    for place in range(SHINGLE):
        hashes += flat[place : place + size] * np.uint64(int(random.integers(1 << 62)) * 2 + 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64 (Steele et al. 2014)
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    inside = np.ones(size, bool)
    for back in range(1, SHINGLE):
        inside[(ends[:-1] - back)] = False  # a window must not begin in one row and end in the next
    counts = lengths - (SHINGLE - 1)
    return hashes[inside], np.concatenate([[0], np.cumsum(counts)[:-1]])
