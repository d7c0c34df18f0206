"""Files -> training and evaluation rows, with honest counts.

    rows read ─┬─ bad (not JSON, empty reply, wrong roles ...)   stop, or skip and count     data.on_bad_row
               ├─ longer than max_length                         stop, drop, or cut the end  data.overlong
               ├─ evaluation                                     a share by hash, or a file  data.eval
               └─ trained

JSONL is read line by line here and not by a columnar reader, which wants one type per column and bends values to it
("007" -> 7, a JSON reply -> an object). A row's meaning never depends on the rows around it.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from finetune import chat, formats
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
    loaded = _load(data.train, data, tokenizer, data.limit)
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
    sources = find(source)
    layout, _ = _layout(sources, data, None)
    bad = _Bad()
    found = []
    for where, row in _rows_of(sources, None):
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

    sources: list[Source]
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
    sources = find(source)
    layout, reason = _layout(sources, data, limit)
    loaded = _Loaded(sources, layout, reason, data.max_length)
    for where, row in _rows_of(sources, limit):
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


def _layout(sources: list[Source], data: Data, limit: int | None) -> tuple[str, str]:
    """The layout and why, from the columns of all rows: the answer must not hang on which row comes first."""
    columns = dict.fromkeys(key for _, row in _rows_of(sources, limit) if isinstance(row, dict) for key in row)
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


# ----------------------------------------------------------------------------------------------------- files -> rows

_Found = Iterator[tuple[str, dict[str, Any] | BadRow]]  # where it stands ("file:line"), and the row or what is wrong


@dataclass(frozen=True)
class Source:
    """A file, or (without a path) a hub data set."""

    name: str
    path: Path | None

    def sha256(self) -> str | None:
        if self.path is None:
            return None
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


def find(names: str | Sequence[str]) -> list[Source]:
    """The files and hub data sets that `data.train` or `data.eval` names.

    Raises `DataError` for what is not there, a folder, an empty file, an unknown kind of file, a file named twice.
    """
    sources = [source for name in ([names] if isinstance(names, str) else names) for source in _find_one(name)]
    seen: set[str] = set()
    for source in sources:
        if source.path is not None:
            _check_file(source.name, source.path)
        if (key := str(source.path.resolve() if source.path else source.name)) in seen:
            raise DataError(f"{source.name} is named twice in the data.", "Name each file once.")
        seen.add(key)
    return sources


def _find_one(name: str) -> list[Source]:
    if name.partition(":")[0] == "home-intents":
        return [Source(name, _home_intents(name.partition(":")[2] or "train"))]
    path = Path(name).expanduser()
    if path.exists():
        return [Source(name, path)]
    if glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(file)]
        if not files:
            raise DataError(f"No file fits {name}.", "Check the pattern and the folder it starts from.")
        return [Source(str(file), file) for file in files]
    if path.suffix.lower() in _READERS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.\[\]%-]+)?", name):
        raise DataError(f"There is no file {name}.", f"Check the path; it starts from {Path.cwd()}.")
    return [Source(name, None)]


def _home_intents(split: str) -> Path:
    from finetune import home_intents

    if split == "train":
        return home_intents.path("train")
    if split == "test":
        return home_intents.path("test")
    raise DataError(f"home-intents has no part '{split}'.", "Use home-intents or home-intents:test.")


def _check_file(name: str, path: Path) -> None:
    if path.is_dir():
        raise DataError(
            f"{name} is a folder, not a file.", f"Name its files, for instance {name.rstrip('/')}/*.jsonl."
        )
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{name} is of a kind that cannot be read.", f"Known are {', '.join(_READERS)}.")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}.", "Check the rights of the file.") from None
    if not start:
        raise DataError(f"{name} is empty.", "Put rows into it, or name another file.")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name} is UTF-16 text (it starts with that byte-order mark).", "Save it as UTF-8.")


def _rows_of(sources: Iterable[Source], limit: int | None) -> _Found:
    return islice((found for source in sources for found in _rows_in(source)), limit)


def _rows_in(source: Source) -> _Found:
    """The rows of one source; what ends the reading half-way is a `DataError` too."""
    if source.path is None:
        yield from _hub_rows(source.name)
        return
    try:
        yield from _READERS[source.path.suffix.lower()](source.name, source.path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{source.name} cannot be read to its end: {error}.", "Save it again as UTF-8 text."
        ) from None


def _whole(row: dict[str, Any] | BadRow) -> dict[str, Any]:
    if isinstance(row, BadRow):
        raise row
    return row


def _json_rows(name: str, path: Path) -> _Found:
    """JSON lines, or one JSON array. Byte-order mark, CRLF, blank lines and the last newline make no difference."""
    begun = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text and not begun and text.startswith(b"["):
                break
            if text == b"{" and not begun:
                raise DataError(
                    f"{name} is one JSON object spread over many lines.",
                    "Write one object per line, or an array of them.",
                )
            if text:
                begun = True
                yield f"{name}:{number}", _json_row(text)
        else:
            return
    yield from _array_rows(name, path.read_text(encoding="utf-8-sig"))


def _json_row(line: bytes) -> dict[str, Any] | BadRow:
    decoder, faults = _strict_json()
    try:
        text = line.decode()
        value = decoder.decode(text)
    except UnicodeDecodeError as error:
        return BadRow(f"byte {error.start + 1} is not UTF-8", "not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON: {error}", "not JSON")
    return _object(value, text, faults)


def _array_rows(name: str, text: str) -> _Found:
    """The objects of one JSON array, each with the line it begins on."""
    space = re.compile(r"[ \t\r\n]*")

    def after(at: int) -> int:
        found = space.match(text, at)
        return found.end() if found else at

    at, line, counted = after(text.index("[") + 1), 1, 0
    while text[at : at + 1] != "]":
        decoder, faults = _strict_json()
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{name}:{line}: the JSON array cannot be read on: {error}.", "Correct the file there."
            ) from None
        yield f"{name}:{line}", _object(value, text[at:end], faults)
        at = after(end)
        if text[at : at + 1] == ",":
            at = after(at + 1)
        elif text[at : at + 1] != "]":
            raise DataError(f"{name}:{line}: the JSON array has no end or lacks a comma.", "Correct the file there.")
    if text[at + 1 :].strip():
        raise DataError(
            f"{name}: something stands behind the JSON array.", "Remove it, or write one object per line."
        )


def _strict_json() -> tuple[json.JSONDecoder, list[str]]:
    """A decoder, and the list into which it writes what the standard forbids but Python accepts."""
    faults: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        known = dict(items)
        if len(known) < len(items):
            twice = next(key for key, count in Counter(key for key, _ in items).items() if count > 1)
            faults.append(f"the key '{twice}' stands twice in one object")
        return known

    def constant(name: str) -> None:
        faults.append(f"{name} is no number in JSON")

    return json.JSONDecoder(object_pairs_hook=pairs, parse_constant=constant), faults


def _object(value: Any, text: str, faults: list[str]) -> dict[str, Any] | BadRow:
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            faults.append("half of a surrogate pair stands alone, which is no text")
    if faults:
        return BadRow(faults[0], "not strict JSON")
    return value if isinstance(value, dict) else BadRow("not an object with named columns", "not an object")


def _csv_rows(name: str, path: Path) -> _Found:
    """Comma- or tab-separated text with a header; every cell is text, a missing cell is null."""
    limit = csv.field_size_limit(1 << 30)  # Python's own limit of 128 KiB is below a long document
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(f"{name}:1: a column name stands twice in the header.", "Rename one of them.")
            for cells in reader:
                where = f"{name}:{reader.line_num}"
                if len(cells) > len(header):
                    yield where, BadRow(f"{len(cells)} cells under {len(header)} column names", "too many cells")
                elif cells:
                    yield where, dict(zip(header, [*cells, *[None] * (len(header) - len(cells))], strict=True))
    finally:
        csv.field_size_limit(limit)


def _parquet_rows(name: str, path: Path) -> _Found:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}:row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{name} cannot be read after row {number}: {error}.", "Write the Parquet file again."
        ) from None


def _hub_rows(name: str) -> _Found:
    """A data set from the hub, `name` or `name:split`."""
    import datasets

    repository, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, split=split or "train")
    except Exception as error:  # datasets raises a dozen unrelated types for "not there" and "no connection"
        raise DataError(
            f"There is no file {name}, and no data set of that name could be read from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}.",
            "Check the path if a file is meant; else check the data set's name, its split and the connection.",
        ) from None
    for number, row in enumerate(rows, 1):
        yield f"{name}:row {number}", dict(row)


_READERS: dict[str, Callable[[str, Path], _Found]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}
