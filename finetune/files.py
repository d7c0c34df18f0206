"""What `data.train` names -> raw rows, each with its place.

    path, glob, hub data set, home-intents  ->  [Source]  ->  Chunk(source=0)  ->  3, {"prompt": "Hi", ...}
                                                              Chunk(source=0)      4, BadRow("not JSON: ...")

A chunk is small and travels to another process, where `rows()` parses it; `sources[chunk.source].where(3)` is the
place in words, "rows.jsonl:3".
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO

from finetune import hub_rows, readers
from finetune.errors import DataError
from finetune.readers import Row

_STARTS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}  # how compressed files begin


@dataclass(frozen=True)
class Source:
    """A file here (`path`), a file of a hub data set (`address`), or a data set that only `datasets` can read."""

    name: str
    path: Path | None = None
    address: str | None = None

    @property
    def note(self) -> str | None:
        """What a user should know about how this is read."""
        if self.path or self.address:
            return None
        return (
            f"{self.name} is read through the library datasets, which may change text that looks like JSON; "
            "its rows are not cached."
        )

    @property
    def kind(self) -> tuple[str, str]:
        """(".jsonl", ".gz") of rows.jsonl.gz."""
        return readers.kind_of(str(self.path or self.address or ""))

    def where(self, line: int) -> str:
        """The place of a row in words."""
        return f"{self.name}:{'row ' if self.kind[0] in ('.parquet', '') else ''}{line}"

    def open(self) -> IO[bytes]:
        assert self.path or self.address, self.name
        return self.path.open("rb") if self.path else hub_rows.open_file(str(self.address))

    def fingerprint(self) -> str | None:
        """What changes when the rows do: SHA-256 of a file's bytes, a hub file's address with its commit and size.

        None where nothing tells whether the rows are still the same.
        """
        if self.address:
            return f"{self.address} {hub_rows.size_of(self.address)}" if "@" in self.address else None
        return self.sha256()

    def sha256(self) -> str | None:
        if self.path is None:
            return None
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


@dataclass(frozen=True)
class Chunk:
    """Some rows of the source with this index."""

    source: int
    block: readers.Block

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Each row, or what is wrong with it, and its line."""
        return readers.rows_of(self.block)


def chunks(sources: Sequence[Source], limit: int | None, size: int = 1 << 20) -> Iterator[Chunk]:
    """The sources in order, in chunks of about `size` bytes; only the first `limit` rows.

    Raises `DataError` where a file cannot be read on; a bad row is handed out as what is wrong with it.
    """
    left = limit
    for index, source in enumerate(sources):
        for block in _blocks(source, size):
            if left is not None:
                block, taken = readers.cut(block, left)
                left -= taken
            yield Chunk(index, block)
            if left == 0:
                return


def _blocks(source: Source, size: int) -> Iterator[readers.Block]:
    if not (source.path or source.address):
        found = hub_rows.stream(source.name)
        for first in count(1, 1000):
            block: readers.Parsed = list(enumerate(islice(found, 1000), first))
            if not block:
                return
            yield block
    try:
        file = source.open()
    except Exception as error:  # files raise OSError; connections what they like
        raise DataError(f"{source.name} cannot be read: {error}.", "Check the file and the connection.") from None
    with file:
        yield from readers.blocks(source.name, file, *source.kind, size)


# ---------------------------------------------------------------------------------------------------- finding files


def find(names: str | Sequence[str]) -> list[Source]:
    """The files and hub data sets that `data.train` or `data.eval` names.

    Raises `DataError` for what is not there, a folder, an empty file, an unknown kind of file, a file named twice.
    """
    sources = [source for name in ([names] if isinstance(names, str) else names) for source in _find_one(name)]
    seen: set[str] = set()
    for source in sources:
        if source.path is not None:
            _check_file(source.name, source.path)
        if (key := source.address or str(source.path.resolve() if source.path else source.name)) in seen:
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
        found = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(file)]
        if not found:
            raise DataError(f"No file fits {name}.", "Check the pattern and the folder it starts from.")
        return [Source(str(file), file) for file in found]
    if readers.kind_of(name)[0] or not hub_rows.is_name(name):
        raise DataError(f"There is no file {name}.", f"Check the path; it starts from {Path.cwd()}.")
    return _hub_sources(name)


def _hub_sources(name: str) -> list[Source]:
    """One source per file of a hub data set, or the whole of it where a file is of a kind that is not known here."""
    addresses = hub_rows.files_of(name)
    if not addresses or not all(readers.kind_of(address)[0] and "::" not in address for address in addresses):
        return [Source(name)]
    return [
        Source(f"{name.partition(':')[0]}/{_inside(address)}", address=address)
        if "://" in address
        else Source(address, Path(address))
        for address in addresses
    ]


def _inside(address: str) -> str:
    """data/train.jsonl of hf://datasets/org/name@5f0e/data/train.jsonl."""
    return address.partition("@")[2].partition("/")[2] or address.rpartition("/")[2]


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
    kind, packing = readers.kind_of(str(path))
    if not kind:
        known = f"{', '.join(readers.KINDS)}, all but the last also with {' or '.join(readers.PACKINGS)} behind"
        raise DataError(f"{name} is of a kind that cannot be read.", f"Known are {known}.")
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start and packing:
                start = readers.unpacked(file, packing).read(4)
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{name} cannot be read: {reason}.", "Check the file and your rights to it.") from None
    if not start:
        raise DataError(f"{name} is empty.", "Put rows into it, or name another file.")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name} is UTF-16 text (it starts with that byte-order mark).", "Save it as UTF-8.")
    for mark, ending in _STARTS.items():
        if start.startswith(mark):
            raise DataError(f"{name} is compressed, and its name does not say so.", f"Add {ending} to its name.")
