"""A folder that is complete or absent: made aside, flushed to the disk, renamed in one step.

    <output>.part-<16 digits>/  <- weights, side files, mark, index last; locked while its maker lives
    <output>/                   <- the same folder, renamed

Blocks are read, computed and written by a few threads at once, each at its own place in the file, and the disk is
given what is written while the next blocks are made. What a killed merge left is removed by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from finetune import weight_files
from finetune.errors import FinetuneError, RunError
from finetune.merge_layout import Layout, Piece
from finetune.merge_math import block_bytes, blocks, load
from finetune.model_files import SideFiles

Progress = Callable[[int, int], None]

THREADS, FACTORS = 8, 16  # at most: blocks at work, and A and B that wait for the next one

_AT_ONCE = 1 << 20  # bytes of one write: with 8 MiB Linux takes ten times the processor time for the same bytes
_UNFLUSHED = 128 << 20  # bytes; the kernel alone would begin to write after gigabytes, and the disk would idle


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block ends well, and disappears when it does not.

    Raises `FinetuneError` when the disk refuses.
    """
    part = output.with_name(f"{output.name}.part-{secrets.token_hex(8)}")
    held = None
    try:
        with weight_files.parents_of(output):
            try:
                part.mkdir()
                held = _lock(part)
                yield part
                weight_files.flush_folder(part)
                part.rename(output)
                weight_files.flush_folder(output.parent)
            except BaseException:  # KeyboardInterrupt too
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        raise FinetuneError(
            f"The merge into {output} stopped: {error}.", "Nothing is left of it; merge again."
        ) from error
    finally:
        if held is not None:
            os.close(held)


def _lock(folder: Path) -> int | None:
    """Hold a folder for as long as this process lives; None when another process does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def remove_leftovers(output: Path) -> None:
    """Remove what merges into `output` left whose process is dead: a lock ends with its process, on any machine."""
    name = re.compile(rf"{re.escape(output.name)}\.part-[0-9a-f]{{16}}")
    found = [part for part in output.parent.iterdir() if name.fullmatch(part.name)] if output.parent.is_dir() else []
    for part in found:
        if (held := _lock(part)) is not None:
            shutil.rmtree(part, ignore_errors=True)
            os.close(held)


def check_space(output: Path, needed: int, base: Path, arriving: int = 0) -> None:
    """Raise `RunError` when a disk is too small: `needed` bytes of `output`, `arriving` of `base`, or both on one."""
    there = next(folder for folder in output.parents if folder.exists())
    if there.stat().st_dev == base.stat().st_dev:
        needed, arriving = needed + arriving, 0
    for folder, what, size in ((there, "merged model", needed), (base, "rest of the base", arriving)):
        if (free := shutil.disk_usage(folder).free) < size:
            raise RunError(
                f"The {what} needs {size / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free.",
                "Free some space or choose another output.",
            )


# ------------------------------------------------------------------------------------------------------------ weights


class _Flusher:
    """Pushes a file to the disk behind the writers' backs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._waiting = 0

    def wrote(self, file: BinaryIO, size: int) -> None:
        """Count written bytes, and begin to flush them when there are many and the disk is idle."""
        self._waiting += size
        if self._waiting >= _UNFLUSHED and (self._running is None or self._running.done()):
            self.wait()
            self._waiting = 0
            self._running = self._pool.submit(os.fdatasync, file.fileno())

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self._pool.shutdown()


def write_weights(part: Path, layout: Layout, progress: Progress | None) -> None:
    """Write the files of a layout; `progress` gets the bytes written so far and in all.

    At most two blocks a thread are at work at any time. Raises what the arithmetic raises, and `OSError`.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the blocks themselves run side by side
    workers = min(os.cpu_count() or 1, THREADS)
    flusher = _Flusher()
    try:
        with ThreadPoolExecutor(workers) as pool:
            writer = _Writer(pool, flusher, 2 * workers, layout.bytes, progress)
            for name, pieces in layout.files.items():
                writer.write(part / name, pieces, layout.metadata[name])
    finally:
        flusher.close()
        torch.set_num_threads(before)


class _Writer:
    """Keeps a few blocks at work and tells how far they are, in their order."""

    def __init__(
        self, pool: ThreadPoolExecutor, flusher: _Flusher, at_once: int, total: int, progress: Progress | None
    ) -> None:
        self.pool, self.flusher, self.at_once = pool, flusher, at_once
        self.done, self.total, self.progress = 0, total, progress
        self.factors = lru_cache(maxsize=FACTORS)(load)  # A and B serve all blocks of a weight
        self.heavy = threading.Semaphore(1)  # whole weights one at a time: those are large

    def write(self, path: Path, pieces: list[Piece], metadata: Mapping[str, str]) -> None:
        """One file, flushed and its header held against what was written."""
        header = weight_files.header_bytes(
            [(piece.name, piece.dtype, piece.source.shape, piece.size) for piece in pieces], metadata
        )
        running: deque[Future[int]] = deque()
        with path.open("wb") as file:
            file.write(header)
            file.flush()
            try:
                place = len(header)
                for piece in pieces:
                    piece.source.wait()  # here, where Ctrl-C ends it
                    for begin, end in blocks(piece):
                        if len(running) >= self.at_once:
                            self.finished(file, running.popleft())
                        running.append(self.pool.submit(self.block, file.fileno(), place, piece, begin, end))
                    place += piece.size
                while running:
                    self.finished(file, running.popleft())
            finally:  # no thread may write once the file is closed
                for each in running:
                    each.cancel()
                for each in running:
                    if not each.cancelled():
                        each.exception()
                self.flusher.wait()
            weight_files.flush(file)
        weight_files.read_shard(path)

    def finished(self, file: BinaryIO, block: Future[int]) -> None:
        size = block.result()
        self.done += size
        self.flusher.wrote(file, size)
        if self.progress and size:
            self.progress(self.done, self.total)

    def block(self, file: int, place: int, piece: Piece, begin: int, end: int) -> int:
        """Make one block and write it to its place; returns its bytes."""
        if piece.copied or piece.by_rows:
            offset, data = block_bytes(piece, begin, end, self.factors)
        else:
            with self.heavy:
                offset, data = block_bytes(piece, begin, end, self.factors)
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done : done + _AT_ONCE], place + offset + done)
        return len(data)


# --------------------------------------------------------------------------------------------------- what lies beside


def write_beside(part: Path, beside: SideFiles) -> None:
    """Copy and write the small files."""
    for name, source in beside.copied.items():
        (part / name).parent.mkdir(exist_ok=True)
        with source.open("rb") as original, (part / name).open("wb") as copy:
            shutil.copyfileobj(original, copy)
            weight_files.flush(copy)
    for name, value in beside.written.items():
        write_json(part / name, value)


def write_index(part: Path, layout: Layout) -> None:
    """The index of a model in several files."""
    place = {piece.name: name for name, pieces in layout.files.items() for piece in pieces}
    content = {"metadata": {"total_size": layout.bytes}, "weight_map": dict(sorted(place.items()))}
    write_json(part / weight_files.INDEX, content)


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """One JSON file, flushed to the disk."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """One text file, flushed to the disk."""
    with file.open("wb") as target:
        target.write(text.encode())
        weight_files.flush(target)
