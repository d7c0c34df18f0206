"""Finished rows in an Arrow file, mapped into memory: a row is read when it is asked for.

    column      of a row
    input_ids   list<int32>   its tokens
    trained     list<bool>    whether a token gives a loss (one bit each)
    supervised  int32         how many do; a row's first token never does, nothing stands before it to predict it from
    source      int16         which source it comes from, by number
    line        int64         where it stands there
    digest      uint64        hash of the conversation
    key         uint64        hash of what must stay on one side of a split

A million rows of 200 tokens take about 0.85 GB on disk and next to nothing in memory. pyarrow and numpy are imported
inside the functions, as everything heavy is in the cold half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.chat import IGNORE, Encoded

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Where = Callable[[int, int], str]  # (source, line) -> "rows.jsonl:3"


class Rows:
    """Rows of token ids and labels in the order of their files; `take` gives a view of some, in any order."""

    def __init__(self, table: pa.Table, where: Where | None = None, order: np.ndarray | None = None) -> None:
        self._table, self._where, self._order = table, where, order

    @classmethod
    def of(cls, rows: Sequence[Encoded]) -> Rows:
        """Rows that are at hand."""
        import pyarrow as pa

        return cls(pa.Table.from_batches([batch(rows)]))

    @classmethod
    def open(cls, path: Path, where: Where | None = None) -> Rows:
        """The rows of a file that `Writer` has written."""
        import pyarrow as pa

        with pa.memory_map(str(path)) as file:
            return cls(pa.ipc.open_file(file).read_all(), where)

    def __len__(self) -> int:
        return self._table.num_rows if self._order is None else len(self._order)

    def __getitem__(self, index: int) -> Encoded:
        import numpy as np

        at = self._at(index)
        ids = self._table["input_ids"][at].values.to_numpy()
        mask = self._table["trained"][at].values.to_numpy(zero_copy_only=False)
        return Encoded(ids.tolist(), np.where(mask, ids, IGNORE).tolist())

    def __iter__(self) -> Iterator[Encoded]:
        return (self[index] for index in range(len(self)))

    def ids(self, index: int) -> np.ndarray:
        """The tokens of one row [length], int32, not copied."""
        found: np.ndarray = self._table["input_ids"][self._at(index)].values.to_numpy()
        return found

    def place(self, index: int) -> str:
        """Where a row stands in its file."""
        at = self._at(index)
        source, line = self._table["source"][at].as_py(), self._table["line"][at].as_py()
        return self._where(source, line) if self._where else f"row {line}"

    def _at(self, index: int) -> int:
        number = range(len(self))[index]
        return number if self._order is None else int(self._order[number])

    def column(self, name: str) -> np.ndarray:
        """One number (or hash) of every row."""
        found: np.ndarray = self._table[name].to_numpy()
        return found if self._order is None else found[self._order]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row."""
        import pyarrow.compute as pc

        found: np.ndarray = pc.list_value_length(self._table["input_ids"]).to_numpy()
        return found if self._order is None else found[self._order]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(tokens, tokens that give a loss) of every row."""
        return list(zip(self.lengths.tolist(), self.column("supervised").tolist(), strict=True))

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum(dtype="int64"))

    @property
    def trained_tokens(self) -> int:
        """Tokens of all rows that give a loss."""
        return int(self.column("supervised").sum(dtype="int64"))

    def laid_out(self) -> tuple[list[int], int]:
        """What `batches.laid_out` runs at most: tokens of each row, and how many tokens all rows begin with."""
        import numpy as np

        chosen = np.arange(self._table.num_rows) if self._order is None else self._order
        if not len(chosen):
            return [], 0
        bounds = [_predictions(chunk) for chunk in self._table["trained"].chunks]
        firsts, lasts = (np.concatenate(parts)[chosen] for parts in zip(*bounds, strict=True))
        shared, before = self.ids(0)[: firsts.min()], 0
        for chunk in self._table["input_ids"].chunks:
            inside = chosen[(chosen >= before) & (chosen < before + len(chunk))] - before
            shared, before = _alike(chunk, inside, shared), before + len(chunk)
        return (lasts + 1).tolist(), len(shared)

    def take(self, indices: Any) -> Rows:
        """These rows, in this order; none is copied."""
        import numpy as np

        chosen = np.asarray(indices, dtype=np.int64)
        return Rows(self._table, self._where, chosen if self._order is None else self._order[chosen])

    def whole(self, indices: Sequence[int]) -> list[Encoded]:
        """These rows."""
        return [self[index] for index in indices]

    def examples(self, indices: Sequence[int]) -> dict[str, list[list[int]]]:
        """Rows in the words of TRL's collator."""
        rows = [self[index] for index in indices]
        return {"input_ids": [row.input_ids for row in rows], "labels": [row.labels for row in rows]}


class Packs(Rows):
    """Rows laid end to end: each pack is a sequence of whole rows, told apart by `seq_lengths`."""

    def __init__(self, rows: Rows, packs: Sequence[Sequence[int]]) -> None:
        self.rows, self.packs = rows, packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Encoded:
        rows = [self.rows[row] for row in self.packs[index]]
        return Encoded([i for row in rows for i in row.input_ids], [label for row in rows for label in row.labels])

    def place(self, index: int) -> str:
        """Where the first of its rows stands."""
        return self.rows.place(self.packs[index][0])

    def ids(self, index: int) -> np.ndarray:
        """The tokens of one pack."""
        import numpy as np

        return np.concatenate([self.rows.ids(row) for row in self.packs[index]])

    def column(self, name: str) -> np.ndarray:
        """The sum over the rows of each pack."""
        import numpy as np

        of_rows = self.rows.column(name)
        return np.array([of_rows[list(pack)].sum() for pack in self.packs])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every pack."""
        import numpy as np

        of_rows = self.rows.lengths
        return np.array([of_rows[list(pack)].sum() for pack in self.packs])

    def laid_out(self) -> tuple[list[int], int]:
        """The same of the rows in all packs, each by itself."""
        return self.rows.laid_out()

    def take(self, indices: Any) -> Rows:
        """These packs."""
        return Packs(self.rows, [self.packs[index] for index in indices])

    def whole(self, indices: Sequence[int]) -> list[Encoded]:
        """The rows in these packs."""
        return [self.rows[row] for index in indices for row in self.packs[index]]

    def examples(self, indices: Sequence[int]) -> dict[str, list[list[int]]]:
        """Packs in the words of TRL's collator, which starts the positions anew at every row."""
        found = super().examples(indices)
        lengths = self.rows.lengths
        found["seq_lengths"] = [[int(lengths[row]) for row in self.packs[index]] for index in indices]
        return found


class Writer:
    """Writes batches of finished rows to a file, one after the other."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, batch([]).schema)

    def __enter__(self) -> Writer:
        return self

    def write(self, rows: pa.RecordBatch) -> None:
        """Append the rows of one batch."""
        if rows.num_rows:
            self._writer.write_batch(rows)

    def __exit__(self, *problem: object) -> None:
        self._writer.close()
        self._file.close()


def batch(
    rows: Sequence[Encoded],
    source: int = 0,
    lines: Sequence[int] | None = None,
    digests: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """Rows of one source as they are stored; `lines`, `digests` and `keys` default to numbers and zeros."""
    import numpy as np
    import pyarrow as pa

    count = len(rows)
    ends = np.zeros(count + 1, dtype=np.int32)
    np.cumsum([len(row.input_ids) for row in rows], out=ends[1:])
    ids = np.fromiter(chain.from_iterable(row.input_ids for row in rows), dtype=np.int32, count=ends[-1])
    labels = np.fromiter(chain.from_iterable(row.labels for row in rows), dtype=np.int32, count=ends[-1])
    mask = labels != IGNORE
    scored = mask.copy()
    scored[ends[:-1]] = False
    supervised = np.add.reduceat(scored, ends[:-1], dtype=np.int32) if count else np.zeros(0, np.int32)
    return pa.record_batch({
        "input_ids": pa.ListArray.from_arrays(pa.array(ends), pa.array(ids)),
        "trained": pa.ListArray.from_arrays(pa.array(ends), pa.array(mask)),
        "supervised": pa.array(supervised),
        "source": pa.array(np.full(count, source, dtype=np.int16)),
        "line": pa.array(lines if lines is not None else range(1, count + 1), type=pa.int64()),
        "digest": pa.array(digests if digests is not None else [0] * count, type=pa.uint64()),
        "key": pa.array(keys if keys is not None else [0] * count, type=pa.uint64()),
    })  # fmt: skip


def _predictions(trained: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last token of each row that predicts one that gives a loss; 0 and 0 where none does."""
    import numpy as np

    ends = trained.offsets.to_numpy()
    starts, ends = ends[:-1], ends[1:]
    at = trained.values.to_numpy(zero_copy_only=False).nonzero()[0]
    first, last = np.searchsorted(at, starts + 1), np.searchsorted(at, ends) - 1  # nothing predicts the first token
    at = np.append(at, 0)
    some = last >= first
    return np.where(some, at[first] - starts - 1, 0), np.where(some, at[last] - starts - 1, 0)


def _alike(chunk: pa.ListArray, rows: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """As much of `shared` as these rows of a chunk begin with; none of them is shorter."""
    starts, ids = chunk.offsets.to_numpy()[rows], chunk.values.to_numpy()
    for place, token in enumerate(shared):
        if (ids[starts + place] != token).any():
            return shared[:place]
    return shared
