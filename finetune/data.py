"""Files -> training and evaluation rows, with honest counts.

rows read ─┬─ bad (not JSON, empty reply, wrong roles ...)   stop, or skip and count     data.on_bad_row
           ├─ longer than max_length                         stop, drop, or cut the end  data.overlong
           ├─ evaluation                                     a share by hash, or a file  data.eval
           └─ trained
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune import chat, files, formats
from finetune.errors import DataError
from finetune.formats import BadRow, Message
from finetune.recipe import Data, Recipe

LISTED = 20  # bad rows named in a message


class Rows:
    """Token rows in flat arrays: 8 bytes a token, where lists of Python numbers take about 50."""

    def __init__(self) -> None:
        self._ids, self._labels, self._ends = array("i"), array("i"), array("q", [0])

    def append(self, row: chat.Encoded) -> None:
        self._ids.extend(row.input_ids)
        self._labels.extend(row.labels)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> chat.Encoded:
        at = slice(self._ends[range(len(self))[index]], self._ends[range(len(self))[index] + 1])
        return chat.Encoded(self._ids[at].tolist(), self._labels[at].tolist())

    def __iter__(self) -> Iterator[chat.Encoded]:
        return (self[index] for index in range(len(self)))

    @property
    def input_ids(self) -> list[list[int]]:
        return [row.input_ids for row in self]

    @property
    def labels(self) -> list[list[int]]:
        return [row.labels for row in self]

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(tokens, tokens that give a loss) of every row."""
        return [(len(row.input_ids), _trained(row)) for row in self]

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def trained_tokens(self) -> int:
        """Labels that give a loss. A row's first label never does: nothing stands before it to predict it from."""
        return sum(_trained(row) for row in self)

    def take(self, indices: Iterable[int]) -> Rows:
        taken = Rows()
        for index in indices:
            taken.append(self[index])
        return taken


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the trainer. `counts` is the content of data.json; `notes` are sentences for the user."""

    train: Rows
    eval: Rows | None
    counts: dict[str, Any]
    notes: list[str]


def prepare(recipe: Recipe, tokenizer: Any) -> Prepared:
    """Read, check, encode and split the rows of a recipe.

    Raises `DataError` when a file or too much of it cannot be used, and always when nothing would be trained.
    """
    data = recipe.data
    loaded = _load(list(data.sources), data, tokenizer, data.limit)
    notes = chat.notes(tokenizer) if loaded.format != "text" else []
    counts: dict[str, Any] = {**loaded.counts(), "eval": None}
    train, held = loaded.rows, None
    if isinstance(data.eval, float):
        train, held = _split(loaded, data.eval)
        counts["eval"] = {"share": data.eval}
    elif data.eval is not None:
        other = _load(data.eval, data, tokenizer, None)
        held = other.rows
        counts["eval"] = other.counts()
        if both := len(set(other.digests) & set(loaded.digests)):
            notes.append(f"{both} evaluation rows are also trained, which flatters the evaluation loss.")
        counts["eval"]["also_trained"] = both
    if copies := len(loaded.digests) - len(set(loaded.digests)):
        notes.append(f"{copies} of {len(loaded.digests)} rows are exact copies of earlier ones; all are kept.")
    counts.update(rows_trained=len(train), rows_evaluated=len(held or ()), rows_copied=copies, **_token_counts(train))
    if held is not None:
        counts["eval"].update(rows=len(held), **_token_counts(held))
    counts["first_ids"] = train[0].input_ids[:8]
    counts["first_tokens"] = tokenizer.convert_ids_to_tokens(counts["first_ids"])
    return Prepared(train, held, counts, notes)


def read_messages(source: str, data: Data) -> list[list[Message]]:
    """The conversations of a file, for asking a model: the same reading and the same verdicts as for training.

    Raises `DataError` as `prepare` does; rows skipped by `on_bad_row: skip` are left out.
    """
    sources = files.find(source)
    layout, _ = layout_of(sources, data, None)
    bad = _Bad()
    found = []
    for where, row in files.rows(sources, None):
        try:
            found.append(formats.to_messages(_whole(row), layout, data.system))
        except BadRow as error:
            bad.add(where, error)
    bad.check(data, len(found))
    return found


# ---------------------------------------------------------------------------------------------------- rows -> tokens


@dataclass
class _Bad:
    """The rows that cannot be trained, by kind, the first of them in words."""

    kinds: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, where: str, error: BadRow) -> None:
        self.kinds[error.kind] += 1
        if len(self.lines) < LISTED:
            self.lines.append(f"{where}: {error.reason}")

    def check(self, data: Data, good: int) -> None:
        count = sum(self.kinds.values())
        if not count or (data.on_bad_row == "skip" and good):
            return
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.most_common())
        more = f"\n  and {count - len(self.lines)} more" * (count > len(self.lines))
        listed = "".join(f"\n  {line}" for line in self.lines)
        raise DataError(
            f"{count} of {count + good} rows cannot be trained ({kinds}):{listed}{more}\n",
            "Correct them, or set data.on_bad_row: skip to leave them out and count them."
            if good
            else "Correct them; with none left there is nothing to train.",
        )


@dataclass
class _Loaded:
    """What one set of files gave."""

    sources: list[files.Source]
    format: str
    reason: str
    max_length: int
    rows: Rows = field(default_factory=Rows)
    digests: list[str] = field(default_factory=list)
    bad: _Bad = field(default_factory=_Bad)
    read: int = 0
    overlong: int = 0
    longest: tuple[int, str] = (0, "")
    dropped: int = 0
    dropped_tokens: int = 0
    cut: int = 0
    cut_tokens: int = 0
    systems: set[str | None] = field(default_factory=set)

    def add(self, where: str, row: chat.Encoded, digest: str, overlong: str) -> None:
        length = len(row.input_ids)
        self.longest = max(self.longest, (length, where), key=lambda seen: seen[0])
        if length > self.max_length:
            self.overlong += 1
            kept = chat.Encoded(row.input_ids[: self.max_length], row.labels[: self.max_length])
            if overlong != "truncate-end" or not _trained(kept):
                self.dropped += 1
                self.dropped_tokens += length
                return
            self.cut += 1
            self.cut_tokens += length - self.max_length
            row = kept
        self.rows.append(row)
        self.digests.append(digest)

    def check(self, data: Data) -> None:
        """Raise for every policy that says stop, and when nothing is left."""
        self.bad.check(data, self.read - sum(self.bad.kinds.values()))
        length, where = self.longest
        if self.overlong and data.overlong == "error":
            raise DataError(
                f"{self.overlong} of {self.read} rows are longer than data.max_length {self.max_length} tokens; the "
                f"longest has {length} ({where}).",
                f"Set data.max_length to {length}, or data.overlong to drop or truncate-end.",
            )
        if not len(self.rows):
            names = ", ".join(source.name for source in self.sources)
            raise DataError(
                f"No row of {names} is left to train: {self.read} read, {sum(self.bad.kinds.values())} bad, "
                f"{self.dropped} dropped as longer than data.max_length {self.max_length} (up to {length}).",
                "Raise data.max_length, or correct the rows." if self.read else "Put rows into the file.",
            )

    def counts(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "format_reason": self.reason,
            "files": [{"name": source.name, "sha256": source.sha256()} for source in self.sources],
            "rows_read": self.read,
            "rows_bad": dict(self.bad.kinds),
            "bad_rows": self.bad.lines,
            "rows_overlong": self.overlong,
            "rows_dropped": self.dropped,
            "tokens_dropped": self.dropped_tokens,
            "rows_cut": self.cut,
            "tokens_cut": self.cut_tokens,
            "longest_read": self.longest[0],
            "max_length": self.max_length,
            "system": self.common_system(),
        }

    def common_system(self) -> str | None:
        """The system message that every row has, which a chat with the trained model then starts with."""
        return next(iter(self.systems)) if len(self.systems) == 1 else None


def _token_counts(rows: Rows) -> dict[str, Any]:
    trained = rows.trained_tokens
    return {
        "tokens": rows.tokens,
        "trained_tokens": trained,
        "trained_share": round(trained / rows.tokens, 4),
        "longest": max(rows.lengths),
    }


def _load(source: str | list[str], data: Data, tokenizer: Any, limit: int | None) -> _Loaded:
    sources = files.find(source)
    layout, reason = layout_of(sources, data, limit)
    loaded = _Loaded(sources, layout, reason, data.max_length)
    for where, row in files.rows(sources, limit):
        loaded.read += 1
        try:
            messages = formats.to_messages(_whole(row), layout, data.system)
            loaded.add(where, chat.encode(tokenizer, messages), row_hash(messages), data.overlong)
            if len(loaded.systems) < 2:
                loaded.systems.add(messages[0]["content"] if messages[0]["role"] == "system" else None)
        except BadRow as error:
            loaded.bad.add(where, error)
    loaded.check(data)
    return loaded


def _whole(row: dict[str, Any] | BadRow) -> dict[str, Any]:
    if isinstance(row, BadRow):
        raise row
    return row


def layout_of(sources: list[files.Source], data: Data, limit: int | None) -> tuple[str, str]:
    """The layout and why, from the columns of all rows: the answer must not hang on which row comes first."""
    columns = dict.fromkeys(key for _, row in files.rows(sources, limit) if isinstance(row, dict) for key in row)
    if data.format == "auto":
        if not columns:  # nothing but bad rows: any layout lets them be reported
            return "messages", "no readable row"
        layout, reason = formats.detect(columns)
    else:
        layout, reason = data.format, "set in the recipe"
        if columns:
            formats.check_columns(columns, layout)
    if layout == "text" and data.system is not None:
        raise DataError(
            "data.system is set, but rows of plain text have no place for a system message.",
            "Remove data.system, or give the rows as prompt and completion.",
        )
    return layout, reason


def row_hash(messages: Sequence[Message]) -> str:
    """SHA-256 of a conversation, the same on every machine and wherever the row stands."""
    canonical = json.dumps(list(messages), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _split(loaded: _Loaded, share: float) -> tuple[Rows, Rows]:
    """Hold out the rows whose hash, read as a fraction of all hashes, lies below `share`.

    Equal rows have equal hashes, so a row is never on both sides, and other rows don't move it. Where that leaves a
    side empty, the row with the lowest (or highest) hash goes there.
    """
    fractions = [int(digest, 16) / 2**256 for digest in loaded.digests]
    if len(set(fractions)) < 2:
        raise DataError(
            f"data.eval {share} wants rows held out, but there is only one to train on.",
            "Give more rows, a file with evaluation rows, or data.eval: none.",
        )
    held = {fraction for fraction in fractions if fraction < share} or {min(fractions)}
    held -= {max(fractions)}
    sides: tuple[list[int], list[int]] = ([], [])
    for index, fraction in enumerate(fractions):
        sides[fraction in held].append(index)
    return loaded.rows.take(sides[0]), loaded.rows.take(sides[1])


def _trained(row: chat.Encoded) -> int:
    return len(row.labels[1:]) - row.labels[1:].count(chat.IGNORE)
