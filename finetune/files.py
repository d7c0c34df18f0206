"""What `data.train` names -> raw rows, each with its place.

    path, glob, hub data set, home-intents  ->  [Source]  ->  ("rows.jsonl:3", {"prompt": "Hi", "completion": "Yes"})
                                                              ("rows.jsonl:4", BadRow("not JSON: ..."))

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.errors import DataError
from finetune.formats import BadRow

Found = Iterator[tuple[str, dict[str, Any] | BadRow]]  # where it stands ("file:line"), and the row or what is wrong


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


def rows(sources: Iterable[Source], limit: int | None) -> Found:
    """The rows of the sources one after the other, the first `limit` of them.

    Raises `DataError` where a file cannot be read on; a bad row is handed out as what is wrong with it.
    """
    return islice((found for source in sources for found in _rows_in(source)), limit)


def _rows_in(source: Source) -> Found:
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


def _json_rows(name: str, path: Path) -> Found:
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


def _array_rows(name: str, text: str) -> Found:
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


def _csv_rows(name: str, path: Path) -> Found:
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


def _parquet_rows(name: str, path: Path) -> Found:
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


def _hub_rows(name: str) -> Found:
    """A data set from the hub, `name` or `name:split`."""
    import datasets

    repository, _, split = name.partition(":")
    try:
        table = datasets.load_dataset(repository, split=split or "train")
    except Exception as error:  # datasets raises a dozen unrelated types for "not there" and "no connection"
        raise DataError(
            f"There is no file {name}, and no data set of that name could be read from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}.",
            "Check the path if a file is meant; else check the data set's name, its split and the connection.",
        ) from None
    for number, row in enumerate(table, 1):
        yield f"{name}:row {number}", dict(row)


_READERS: dict[str, Callable[[str, Path], Found]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}
