"""One open file -> blocks of rows, each row with its line; memory stays flat however large the file is.

    JSON lines        Lines(first=1201, text=b'{"prompt": ...}\\n{...')     whole lines, not parsed yet: a worker does
    JSON array  --+
    CSV, TSV      +-- [(3, {"prompt": "Hi", ...}), (4, BadRow("..."))]     rows parsed here, about 1,000 at a time
    Parquet     --+

JSONL is read line by line and not by a columnar reader, which wants one type per column and bends values to it
("007" -> 7, a JSON reply -> an object). A row's meaning never depends on the rows around it. What is wrong with one
row is a `BadRow` in its place; what keeps a file from being read on is a `DataError` with the line reached.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple, cast

from finetune import json_array, strict_json
from finetune.errors import DataError
from finetune.formats import BadRow

Row = dict[str, Any] | BadRow  # or what is wrong with it
Parsed = list[tuple[int, Row]]


class Lines(NamedTuple):
    """Whole lines of JSON as they lie in the file, the first of them being line `first`."""

    first: int
    text: bytes


Block = Lines | Parsed

PACKINGS = (".gz", ".zst")
_ROWS = 1000  # in a parsed block, at most
_BOM = b"\xef\xbb\xbf"
_WHITE = b" \t\r\n"  # the white space of JSON
_WIDEST = 1 << 28  # characters of a CSV cell; Python's own limit of 128 KiB is below a long document


def kind_of(name: str) -> tuple[str, str]:
    """(".jsonl", ".gz") of "rows.jsonl.gz"; ("", ...) for what cannot be read."""
    found = re.search(r"(\.[a-z]+)(\.gz|\.zst|)$", name.lower())
    kind, packing = found.groups() if found else ("", "")
    known = kind in _READERS and not (packing and kind == ".parquet")
    return (kind if known else "", packing)


def blocks(name: str, file: IO[bytes], kind: str, packing: str, size: int) -> Iterator[Block]:
    """The blocks of an open file, each of about `size` bytes or 1,000 rows; `name` is for messages."""
    if kind == ".parquet":
        yield from _parquet(name, file, size)
        return
    counted = _Counted(unpacked(file, packing))
    try:
        yield from _READERS[kind](name, io.BufferedReader(counted, 1 << 16), size)
    except OSError as error:
        raise _cannot(
            name, f"after line {counted.lines}", error, "Check the file, and copy or pack it again."
        ) from None


def rows_of(block: Block) -> Iterator[tuple[int, Row]]:
    """The rows of a block with their lines; JSON lines are parsed here."""
    if not isinstance(block, Lines):
        yield from block
        return
    for number, line in enumerate(block.text.split(b"\n"), block.first):
        if text := line.removeprefix(_BOM).strip(_WHITE):
            yield number, _json_row(text)


def cut(block: Block, rows: int) -> tuple[Block, int]:
    """At most the first `rows` rows of a block, and how many they are; nothing is parsed for it."""
    if not isinstance(block, Lines):
        return block[:rows], min(len(block), rows)
    lines = block.text.split(b"\n")
    filled = [number for number, line in enumerate(lines, 1) if line.removeprefix(_BOM).strip(_WHITE)][:rows]
    return Lines(block.first, b"\n".join(lines[: filled[-1]]) if filled else b""), len(filled)


def unpacked(file: IO[bytes], packing: str) -> IO[bytes]:
    """What a compressed file holds."""
    if packing == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if packing == ".zst":
        import pyarrow as pa

        return cast(IO[bytes], pa.CompressedInputStream(file, "zstd"))
    return file


def _grouped(rows: Iterator[tuple[int, Row, int]], size: int) -> Iterator[Parsed]:
    """Rows of (line, row, length) in blocks of at most 1,000 rows or about `size` characters."""
    found: Parsed = []
    whole = 0
    for line, row, length in rows:
        found.append((line, row))
        whole += length
        if len(found) == _ROWS or whole >= size:
            yield found
            found, whole = [], 0
    if found:
        yield found


class _Counted(io.RawIOBase):
    """A stream that knows how many lines it has given, and whose every failure is an `OSError`.

    Below it may be gzip, Arrow or a connection to the hub, which raise a dozen unrelated types.
    """

    def __init__(self, below: IO[bytes]) -> None:
        self._read: Callable[[int], bytes] = getattr(below, "read1", below.read)
        self.lines = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self._read(min(len(buffer), 1 << 16))  # what a failing read had already is lost, so small ones
        except Exception as error:
            raise OSError(str(error) or type(error).__name__) from error
        self.lines += block.count(b"\n")
        buffer[: len(block)] = block
        return len(block)


def _cannot(name: str, where: str, reason: object, hint: str) -> DataError:
    return DataError(f"{name} cannot be read to its end; it stops {where}: {reason}.", hint)


# ------------------------------------------------------------------------------------------------------------ JSON


def _json(name: str, file: IO[bytes], size: int) -> Iterator[Block]:
    """JSON lines, or one JSON array. Byte-order mark, CRLF, blank lines and the last newline make no difference."""
    first, begun = 1, False
    while block := file.read(size):
        while not begun and not (start := block.lstrip(_WHITE + _BOM)) and (more := file.read(size)):
            block += more
        if not begun and start.startswith(b"["):
            found = json_array.elements(name, file, block, first, size)
            yield from _grouped(((line, _named(value), length) for line, value, length in found), size)
            return
        block += file.readline()
        if not begun and b"\n" in block and block.strip(_WHITE + _BOM).partition(b"\n")[0].strip() == b"{":
            raise DataError(
                f"{name} is one JSON object spread over many lines.",
                "Write one object per line, or an array of them.",
            )
        begun = True
        yield Lines(first, block)
        first += block.count(b"\n")


def _json_row(line: bytes) -> Row:
    try:
        return _named(strict_json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return BadRow(f"byte {error.start + 1} is not UTF-8", "not UTF-8")
    except strict_json.Refused as error:
        return BadRow(str(error), error.kind)


def _named(value: Any) -> Row:
    if isinstance(value, strict_json.Refused):
        return BadRow(str(value), value.kind)
    return value if isinstance(value, dict) else BadRow("not an object with named columns", "not an object")


# ------------------------------------------------------------------------------------------------------------- CSV


def _csv(name: str, file: IO[bytes], size: int, delimiter: str = ",") -> Iterator[Block]:
    return _grouped(_csv_rows(name, file, delimiter), size)


def _csv_rows(name: str, file: IO[bytes], delimiter: str) -> Iterator[tuple[int, Row, int]]:
    """Separated text with a header; every cell is text, a missing cell is null.

    Lines end with \\n or \\r\\n only: a lone \\r ends a row for some programs and not for others.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _WIDEST))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] = []
    begin = 1
    try:
        for cells in reader:
            if not header:
                header = _header(name, begin, cells)
            elif row := _csv_row(header, cells):
                yield begin, row, sum(map(len, cells))
            begin = reader.line_num + 1
    except UnicodeDecodeError as error:
        line = reader.line_num + 1 + error.object[: error.start].count(b"\n")
        reason = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise _cannot(name, f"in line {line}", reason, "Save it again as UTF-8 text.") from None
    except csv.Error as error:
        raise _cannot(name, f"in line {begin}", *_csv_fault(str(error))) from None


def _csv_row(header: list[str], cells: list[str]) -> Row | None:
    if not cells or (len(cells) == 1 < len(header) and not cells[0].strip()):
        return None  # a blank line
    if len(cells) > len(header):
        return BadRow(f"{len(cells)} cells under {len(header)} column names", "too many cells")
    row = dict(zip(header, [*cells, *[None] * (len(header) - len(cells))], strict=True))
    if "" in row and any(cell.strip() for cell, column in zip(cells[1:], header[1:], strict=False) if not column):
        return BadRow("a filled cell stands under no column name", "too many cells")
    row.pop("", None)  # the first column has no name where a table was saved with its row numbers
    return cast(Row, row)


def _header(name: str, line: int, cells: list[str]) -> list[str]:
    names = [cell for cell in cells if cell.strip()]
    if cells and not names:
        raise DataError(
            f"{name}:{line}: the header names no column.", "Write the columns' names into the first line."
        )
    if len(set(names)) < len(names):
        twice = next(column for column in names if names.count(column) > 1)
        raise DataError(f"{name}:{line}: a column name stands twice in the header: {twice}.", "Rename one of them.")
    return [cell if cell.strip() else "" for cell in cells]


def _csv_fault(error: str) -> tuple[str, str]:
    if "unexpected end of data" in error or "field larger" in error:
        return "a quote opens in this row and never closes", "Close it, or write a quote inside quotes twice."
    if "new-line character" in error:
        return "a carriage return stands alone outside quotes", "Save the file with usual line ends (LF or CRLF)."
    return error, "Put the cell into quotes, and write a quote inside it twice."


# --------------------------------------------------------------------------------------------------------- Parquet


def _parquet(name: str, file: IO[bytes], size: int) -> Iterator[Block]:
    """The rows of a Parquet file; their "lines" are row numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        far = not isinstance(file, io.BufferedReader)  # over a connection many small reads take long
        with pq.ParquetFile(file, pre_buffer=far, buffer_size=0 if far else 1 << 20) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                twice = next(column for column in names if names.count(column) > 1)
                raise DataError(f"{name}: a column name stands twice: {twice}.", "Rename one of them.")
            nested = [field.name for field in table.schema_arrow if pa.types.is_nested(field.type)]
            for group in range(table.num_row_groups):
                held = table.metadata.row_group(group)
                wide = held.total_byte_size // max(held.num_rows, 1) + 1
                for batch in table.iter_batches(min(max(size // wide, 1), _ROWS), row_groups=[group]):
                    rows = _batch_rows(batch, nested)
                    yield list(enumerate(rows, number + 1))
                    number += len(rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{name} cannot be read after row {number}: {error}.", "Write the Parquet file again."
        ) from None


def _batch_rows(batch: Any, nested: list[str]) -> list[Row]:
    try:
        rows: list[Row] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date that Python does not have
        if len(batch) == 1:
            return [BadRow(f"a value cannot be read: {error}", "unreadable value")]
        return [row for at in range(len(batch)) for row in _batch_rows(batch.slice(at, 1), nested)]
    for row in rows if nested else ():
        if isinstance(row, dict):
            row.update({column: _without_nulls(row[column]) for column in nested})
    return rows


def _without_nulls(value: Any) -> Any:
    """Arrow gives the structs of every row the keys of all rows, null where a row had none."""
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    return [_without_nulls(held) for held in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[str, IO[bytes], int], Iterator[Block]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}
KINDS = tuple(_READERS)
