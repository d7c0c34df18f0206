"""Rows that stand twice, and held-out rows that are trained: exactly, by their question, or nearly.

What all rows begin with (the template's start, a system message that every row has) says nothing about two of them
and is left out before they are compared; else a long system message would make near copies of all rows.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Prints:
    """A side's rows by hashes: of the whole row, and of its question. Read once, asked often."""

    side: Side
    indices: np.ndarray  # of the rows, each once
    whole: np.ndarray
    asked: np.ndarray
    start: np.ndarray  # the tokens that all of them begin with

    @classmethod
    def of(cls, side: Side) -> Prints:
        """Reads every row once."""
        import numpy as np

        indices = side.different()
        whole, asked = np.zeros(indices.size, np.uint64), np.zeros(indices.size, np.uint64)
        start: np.ndarray | None = None
        for number, index in enumerate(indices):
            row = side.rows[int(index)]
            ids = np.asarray(row.input_ids, np.int64)
            whole[number] = near.digest(ids)
            asked[number] = near.digest(ids[: question(row)])
            start = ids if start is None else start[: shared(start, ids)]
        return cls(side, indices, whole, asked, np.zeros(0, np.int64) if start is None else start)

    def place(self, number: int) -> str:
        """Where the row stands."""
        return self.side.place(int(self.indices[number]))


def copies(train: Prints) -> Copies:
    """Exact and near copies among the trained rows, and questions with more than one reply."""
    import numpy as np

    _, firsts, group, counts = np.unique(train.whole, return_index=True, return_inverse=True, return_counts=True)
    later = np.ones(train.whole.size, bool)
    later[firsts] = False
    most = []
    for number in np.argsort(-counts, kind="stable")[:_EXAMPLES]:
        if counts[number] > 1:
            one, other = np.flatnonzero(group == number)[:2]
            most.append((int(counts[number]), train.place(one), train.place(other)))
    distinct = np.flatnonzero(~later)
    looked = distinct[:: _every(train)]
    found = near.near_pairs(_Some(train, looked, train.start.size))
    best = sorted(found.pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))[:_EXAMPLES]
    pairs = [Pair(train.place(looked[i]), train.place(looked[j]), round(alike, 3)) for i, j, alike in best]
    asked = train.asked[distinct]
    _, place, often = np.unique(asked, return_inverse=True, return_counts=True)
    replies = (often[place] > 1) & (asked != near.digest([]))
    marked = [*np.flatnonzero(later), *(looked[j] for _, j, _ in found.pairs)]
    return Copies(
        rows=int(train.whole.size),
        exact=int(later.sum()),
        most=most,
        near=found.copies,
        pairs=pairs,
        looked=int(looked.size),
        complete=found.complete,
        replies=int(replies.sum()),
        marked=frozenset(int(train.indices[number]) for number in marked),
    )


def leak(name: str, train: Prints, held: Prints) -> Leak:
    """Which of the held-out rows are trained too."""
    import numpy as np

    same = np.isin(held.whole, train.whole)
    asked = np.isin(held.asked, train.asked) & (held.asked != near.digest([])) & ~same
    rest = np.flatnonzero(~same & ~asked)
    some = np.arange(train.whole.size)[:: _every(train)]
    skip = shared(train.start, held.start)
    found = near.across(_Some(train, some, skip), _Some(held, rest, skip))
    best = sorted(found.pairs, key=lambda pair: (-pair[2], pair[1], pair[0]))[:_EXAMPLES]
    pairs = [Pair(held.place(rest[j]), train.place(some[i]), round(alike, 3)) for i, j, alike in best]
    return Leak(name, int(held.whole.size), int(same.sum()), int(asked.sum()), found.copies, pairs)


def question(row: Encoded) -> int:
    """How many tokens stand before the first trained one; none in a document."""
    return next((at for at, label in enumerate(row.labels) if label != IGNORE), 0)


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    import numpy as np

    length = min(one.size, other.size)
    unlike = np.flatnonzero(one[:length] != other[:length])
    return int(unlike[0]) if unlike.size else length


class _Some:
    """Some rows of a side without the tokens that all of its rows begin with."""

    def __init__(self, prints: Prints, numbers: np.ndarray, skip: int) -> None:
        self.rows, self.indices, self.skip = prints.side.rows, prints.indices[numbers], skip

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Any:
        return self.rows.ids(int(self.indices[index]))[self.skip :]


def _every(prints: Prints) -> int:
    """Every how many-th row is looked through."""
    return max(-(-prints.whole.size // NEAR_ROWS), -(-prints.side.rows.tokens // NEAR_TOKENS), 1)
