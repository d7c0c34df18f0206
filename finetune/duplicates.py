"""Rows that stand twice, and held-out rows that are trained: exactly, by their question, or nearly.

What all rows begin with (the template's start, a system message that every row has) says nothing about two of them
and is left out before they are compared; else a long system message would make near copies of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune import near
from finetune.chat import IGNORE, Encoded
from finetune.store import Rows

if TYPE_CHECKING:
    import numpy as np

NEAR_ROWS, NEAR_TOKENS = 1_000_000, 250_000_000  # looked through for near copies; of more, every n-th row
_EXAMPLES = 3


@dataclass(frozen=True)
class Side:
    """Rows under the name of what becomes of them: "trained", "held out"; `source` stands before their places."""

    name: str
    rows: Rows
    source: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """Where a row stands in its file."""
        return f"{self.source} {self.rows.place(index)}".strip()

    def different(self) -> Any:
        """Indices of the rows; of one that is taken several times, as its source weighs, the first."""
        import numpy as np

        names = ("source", "line", "digest")
        columns = np.stack([self.rows.column(name).astype(np.uint64) for name in names])
        return np.sort(np.unique(columns, axis=1, return_index=True)[1])


@dataclass(frozen=True)
class Pair:
    """Two rows by their places, and how alike they are (Jaccard similarity of five-token shingles)."""

    one: str
    other: str
    similarity: float


@dataclass(frozen=True)
class Copies:
    """Trained rows that stand there before. `looked` of them were compared for near copies."""

    rows: int
    exact: int
    most: list[tuple[int, str, str]]  # (how often, place of the first, of the second), the most frequent first
    near: int
    pairs: list[Pair]
    looked: int
    complete: bool  # whether all that resemble each other could be compared
    replies: int  # rows whose question also has another reply
    marked: frozenset[int]  # the rows that are an exact or near copy

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        found = {name: value for name, value in vars(self).items() if name != "marked"}
        return {**found, "pairs": [vars(pair) for pair in self.pairs]}


@dataclass(frozen=True)
class Leak:
    """Held-out rows that are trained too: the whole row, its question with another reply, or nearly the row."""

    name: str
    rows: int
    same: int
    question: int
    near: int
    pairs: list[Pair]

    @property
    def leaked(self) -> int:
        """Each row counted once."""
        return self.same + self.question + self.near

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {**vars(self), "pairs": [vars(pair) for pair in self.pairs]}


def copies(train: Side) -> Copies:
    """Exact and near copies among the trained rows, and questions with more than one reply."""
    import numpy as np

    rows = train.different()
    same, firsts, group, counts = np.unique(
        _digests(train.rows.ids(row) for row in rows), return_index=True, return_inverse=True, return_counts=True
    )
    later = np.ones(rows.size, bool)
    later[firsts] = False
    most = []
    for number in np.argsort(-counts, kind="stable")[:_EXAMPLES]:
        if counts[number] > 1:
            one, other = rows[np.flatnonzero(group == number)[:2]]
            most.append((int(counts[number]), train.place(one), train.place(other)))
    distinct = rows[~later]
    looked = distinct[:: _every(train, same.size)]
    found = near.near_pairs(_Some(train, looked, common_start([train])))
    best = sorted(found.pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))[:_EXAMPLES]
    pairs = [Pair(train.place(looked[i]), train.place(looked[j]), round(alike, 3)) for i, j, alike in best]
    asked = _digests(question(train.rows[row]) for row in distinct)
    _, place, often = np.unique(asked, return_inverse=True, return_counts=True)
    replies = int(((often[place] > 1) & (asked != near.digest([]))).sum())
    marked = frozenset([*rows[later].tolist(), *(int(looked[j]) for _, j, _ in found.pairs)])
    return Copies(
        int(rows.size), int(later.sum()), most, found.copies, pairs, int(looked.size), found.complete, replies, marked
    )


def leak(name: str, train: Side, held: Side) -> Leak:
    """Which of the held-out rows are trained too."""
    trained, tested = train.different(), range(len(held))
    rows = {near.digest(train.rows.ids(row)) for row in trained}
    questions = {near.digest(question(train.rows[row])) for row in trained} - {near.digest([])}
    same = [near.digest(held.rows.ids(row)) in rows for row in tested]
    asked = [not same[row] and near.digest(question(held.rows[row])) in questions for row in tested]
    rest = [row for row in tested if not same[row] and not asked[row]]
    some, skip = trained[:: _every(train, len(trained))], common_start([train, held])
    found = near.across(_Some(train, some, skip), _Some(held, rest, skip))
    best = sorted(found.pairs, key=lambda pair: (-pair[2], pair[1], pair[0]))[:_EXAMPLES]
    pairs = [Pair(held.place(rest[j]), train.place(some[i]), round(alike, 3)) for i, j, alike in best]
    return Leak(name, len(held), sum(same), sum(asked), found.copies, pairs)


def question(row: Encoded) -> list[int]:
    """What stands before the first trained token; nothing for a document."""
    return row.input_ids[: next((at for at, label in enumerate(row.labels) if label != IGNORE), 0)]


def common_start(sides: Sequence[Side]) -> int:
    """How many tokens all rows begin with."""
    import numpy as np

    start = np.asarray(sides[0].rows.ids(0))
    for side in sides:
        for row in range(len(side)):
            ids = side.rows.ids(row)[: start.size]
            unlike = np.flatnonzero(start[: ids.size] != ids)
            start = start[: unlike[0] if unlike.size else ids.size]
            if not start.size:
                return 0
    return int(start.size)


class _Some:
    """Some rows of a side without the tokens that all of its rows begin with."""

    def __init__(self, side: Side, indices: Sequence[int], skip: int) -> None:
        self.side, self.indices, self.skip = side, indices, skip

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Any:
        return self.side.rows.ids(int(self.indices[index]))[self.skip :]


def _every(side: Side, rows: int) -> int:
    """Every how many-th row is looked through."""
    return max(-(-rows // NEAR_ROWS), -(-side.rows.tokens // NEAR_TOKENS), 1)


def _digests(rows: Iterable[Any]) -> np.ndarray:
    import numpy as np

    return np.fromiter((near.digest(row) for row in rows), np.uint64)
