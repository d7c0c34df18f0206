"""Chunks of raw rows -> finished rows, in this process or in several.

    file -> chunk -> rows -> conversation -> ids and labels -> max_length ─┬─ batch of finished rows
                                                                          └─ tally: read, bad, overlong, why

A chunk's rows depend on nothing but the chunk and the job, so the result is the same however many processes work,
and it comes back in the order of the file. Few chunks wait at a time: memory stays flat however large the files are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from finetune import chat, formats, overlong, store
from finetune.formats import BadRow, Conversation
from finetune.recipe import Data

if TYPE_CHECKING:
    import pyarrow as pa

    from finetune.files import Chunk

LISTED = 20  # rows named in a message
MOST_CHARACTERS = (
    4_000_000  # of one row: more than "War and Peace" has; a tokenizer takes some hundred bytes for each
)
WORTH_IT = 48  # chunks (of about a megabyte, a sixth of a second) from which other processes pay for their start


@dataclass(frozen=True)
class Job:
    """What every chunk is read with."""

    tokenizer: Any
    layout: str
    data: Data


@dataclass
class Tally:
    """What happened to the rows; two tallies add up."""

    read: Counter[int] = field(default_factory=Counter)  # by source
    kept: Counter[int] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)  # by kind
    bad_rows: list[tuple[int, int, str]] = field(default_factory=list)  # source, line, reason; the first of them
    columns: dict[str, None] = field(default_factory=dict)
    longest: tuple[int, int, int] = (0, 0, 0)  # tokens, source, line
    overlong: int = 0
    over: Counter[int] = field(
        default_factory=Counter
    )  # overlong rows by length, in steps of an eighth of max_length
    dropped: int = 0
    cut: int = 0
    split: int = 0
    tokens_lost: int = 0
    trained_lost: int = 0
    systems: set[str | None] = field(default_factory=set)  # the first two

    def refuse(self, source: int, line: int, error: BadRow) -> None:
        """Count a row that cannot be trained."""
        self.bad[error.kind] += 1
        if len(self.bad_rows) < LISTED:
            self.bad_rows.append((source, line, error.reason))

    def add(self, other: Tally) -> None:
        """Take in what came after."""
        for name in ("read", "kept", "bad", "over"):
            getattr(self, name).update(getattr(other, name))
        for name in ("overlong", "dropped", "cut", "split", "tokens_lost", "trained_lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad_rows = [*self.bad_rows, *other.bad_rows][:LISTED]
        self.columns.update(other.columns)
        if other.longest[0] > self.longest[0]:
            self.longest = other.longest
        self.systems = set(sorted(self.systems | other.systems, key=lambda text: (text is not None, text))[:2])


@dataclass(frozen=True)
class Part:
    """What one chunk gave."""

    batch: pa.RecordBatch
    tally: Tally


def encode_chunks(job: Job, chunks: Iterable[Chunk]) -> Iterator[Part]:
    """The parts of all chunks in their order, worked on by several processes where there is enough to do."""
    chunks = iter(chunks)
    first = list(islice(chunks, WORTH_IT))
    processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(first) < WORTH_IT or processes < 2:
        yield from map(partial(encode_chunk, job), chain(first, chunks))
        return
    yield from _spread(job, chain(first, chunks), processes)


def _spread(job: Job, chunks: Iterator[Chunk], processes: int) -> Iterator[Part]:
    """Over fresh processes, which inherit no thread and no lock from this one."""
    from multiprocessing import get_context

    waiting: deque[tuple[Chunk, Future[Part] | None]] = deque()
    with ProcessPoolExecutor(processes, get_context("spawn"), _start, (job,)) as pool:
        for chunk in chunks:
            waiting.append((chunk, _submit(pool, chunk)))
            if len(waiting) > 2 * processes:
                yield _result(job, *waiting.popleft())
        while waiting:
            yield _result(job, *waiting.popleft())


def _submit(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[Part] | None:
    try:
        return pool.submit(_work, chunk)
    except BrokenProcessPool:
        return None


def _result(job: Job, chunk: Chunk, future: Future[Part] | None) -> Part:
    """What a process made of a chunk. Where the processes are gone (one was killed, or they cannot start, as below a
    script without `if __name__ == "__main__"`), the work goes on here."""
    try:
        return future.result() if future else encode_chunk(job, chunk)
    except BrokenProcessPool:
        return encode_chunk(job, chunk)


_job: Job | None = None


def _start(job: Job) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job


def _work(chunk: Chunk) -> Part:
    assert _job is not None
    return encode_chunk(_job, chunk)


# --------------------------------------------------------------------------------------------------------- one chunk


def encode_chunk(job: Job, chunk: Chunk) -> Part:
    """The finished rows of one chunk, and what happened to the others."""
    data, source, tally = job.data, chunk.source, Tally()
    good: list[tuple[int, Conversation, int | None]] = []
    for line, row in chunk.rows():
        tally.read[source] += 1
        try:
            if isinstance(row, BadRow):
                raise row
            tally.columns.update(dict.fromkeys(row))
            talk = formats.to_conversation(formats.renamed(row, data.columns), job.layout, data.system)
            _check_size(talk)
            good.append((line, talk, _group(row, data.eval_group)))
        except BadRow as error:
            tally.refuse(source, line, error)
    encoded = chat.encode_many(job.tokenizer, [talk for _, talk, _ in good], train_on=data.train_on)
    rows: list[chat.Encoded] = []
    lines, digests, keys = [], [], []
    for (line, talk, group), found in zip(good, encoded, strict=True):
        try:
            if isinstance(found, BadRow):
                raise found
            if not overlong.supervised(found):
                raise BadRow("no token of it would give a loss", "no reply")
            fitted = _within_length(job, tally, source, line, talk, found)
        except BadRow as error:
            tally.refuse(source, line, error)
            continue
        digest = row_hash(talk)
        for number, piece in enumerate(fitted):
            rows.append(piece)
            lines.append(line)
            digests.append((digest + number) % 2**64)  # pieces of one conversation are no copies of each other
            keys.append(digest if group is None else group)
        tally.kept[source] += len(fitted)
        if len(tally.systems) < 2:
            first = talk.messages[0]
            tally.systems.add(first["content"] if first["role"] == "system" else None)
    return Part(store.batch(rows, source, lines, digests, keys), tally)


def _within_length(
    job: Job, tally: Tally, source: int, line: int, talk: Conversation, row: chat.Encoded
) -> Sequence[chat.Encoded]:
    """The row, or what data.overlong leaves of it."""
    length, limit = len(row.input_ids), job.data.max_length
    if length > tally.longest[0]:
        tally.longest = (length, source, line)
    if length <= limit:
        return [row]
    policy = job.data.overlong

    def again(messages: Sequence[formats.Message]) -> chat.Encoded:
        [found] = chat.encode_many(job.tokenizer, [Conversation(list(messages), talk.tools)], job.data.train_on)
        if isinstance(found, BadRow):
            raise found
        return found

    fitted = overlong.fit(row, talk.messages, policy, limit, again, job.tokenizer)
    tally.overlong += 1
    tally.over[-(-8 * length // limit)] += 1
    tally.dropped += not fitted.rows
    tally.cut += len(fitted.rows) == 1
    tally.split += len(fitted.rows) > 1
    tally.tokens_lost += fitted.lost
    tally.trained_lost += fitted.lost_trained
    return fitted.rows


def _check_size(talk: Conversation) -> None:
    size = sum(len(message["content"]) for message in talk.messages)
    if size > MOST_CHARACTERS:
        raise BadRow(
            f"it has {size:,} characters, and at most {MOST_CHARACTERS:,} can be prepared; divide it into rows",
            "too large",
        )


def row_hash(talk: Conversation) -> int:
    """64 bits of SHA-256 of a conversation, the same on every machine and wherever the row stands."""
    return _hash([talk.messages, talk.tools])


def _group(row: dict[str, Any], column: str | None) -> int | None:
    """What keeps rows together in a split; a row without one stands by itself."""
    return None if column is None or row.get(column) is None else _hash(row[column])


def _hash(value: Any) -> int:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8], "big")
