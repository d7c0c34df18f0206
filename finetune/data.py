"""Files -> training and evaluation rows, with honest counts.

rows read ─┬─ bad (not JSON, empty reply, wrong roles ...)   stop, or skip and count              data.on_bad_row
           ├─ longer than max_length                         stop, drop, cut or split; counted    data.overlong
           ├─ evaluation                                     a share by hash, or a file           data.eval
           └─ trained, as often as its source weighs         packed, when asked for               data.train, packing

What the files become is kept in the cache by content; splits, weights and packs are made from that each time.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import chat, data_cache, files, formats
from finetune.encoding import Job, Tally, encode_chunks
from finetune.errors import DataError
from finetune.formats import BadRow, Conversation
from finetune.packing import packs
from finetune.recipe import Data, Recipe
from finetune.store import Packs, Rows, Writer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the trainer. `counts` is the content of data.json; `notes` are sentences for the user."""

    train: Rows
    eval: Rows | None
    counts: dict[str, Any]
    notes: list[str]


def prepare(recipe: Recipe, tokenizer: Any) -> Prepared:
    """Read, check, encode, split, weigh and pack the rows of a recipe.

    Raises `DataError` when a file or too much of it cannot be used, and always when nothing would be trained.
    """
    data = recipe.data
    loaded = _load(data.sources, data, tokenizer, data.limit)
    notes = [*chat.notes(tokenizer)] if loaded.about["format"] != "text" else []
    notes += loaded.said
    counts: dict[str, Any] = {**loaded.about, "eval": None}
    train, held = loaded.rows, None
    if isinstance(data.eval, float):
        train, held = _split(loaded.rows, data)
        counts["eval"] = {"share": data.eval}
    elif data.eval is not None:
        other = _load({data.eval: 1.0}, data, tokenizer, None)
        held = other.rows
        counts["eval"] = dict(other.about)
        if both := _also_in(held, train):
            notes.append(f"{both} evaluation rows are also trained, which flatters the evaluation loss.")
        counts["eval"]["also_trained"] = both
    if copies := _copies(loaded.rows):
        notes.append(f"{copies} of {len(loaded.rows)} rows are exact copies of earlier ones; all are kept.")
    train = _weighted(train, list(loaded.weights), recipe.train.seed)
    counts.update(rows_trained=len(train), rows_evaluated=len(held or ()), rows_copied=copies, **_token_counts(train))
    if held is not None:
        counts["eval"].update(rows=len(held), **_token_counts(held))
    counts["first_ids"] = train[0].input_ids[:8]
    counts["first_tokens"] = tokenizer.convert_ids_to_tokens(counts["first_ids"])
    if data.packing is True:
        train = Packs(train, packs(train.lengths, data.max_length, recipe.train.seed))
        fill = train.tokens / (len(train) * data.max_length)
        counts.update(packs=len(train), fill=round(fill, 4), trained_tokens=train.trained_tokens)
        notes.append(
            f"{len(train.rows):,} rows lie in {len(train):,} packs of up to {data.max_length:,} tokens, {fill:.1%} "
            f"filled; a step takes {recipe.train.batch_size} packs."
        )
    return Prepared(train, held, counts, notes)


def read_conversations(source: str, data: Data) -> list[Conversation]:
    """The conversations of a file, for asking a model: the same reading and the same verdicts as for training.

    Raises `DataError` as `prepare` does; rows skipped by `on_bad_row: skip` are left out.
    """
    sources = files.find(source)
    layout, _ = layout_of(columns_of(sources, None), data)
    tally, found = Tally(), []
    for chunk in files.chunks(sources, None):
        for line, row in chunk.rows():
            tally.read[chunk.source] += 1
            try:
                found.append(formats.to_conversation(formats.renamed(_whole(row), data.columns), layout, data.system))
            except BadRow as error:
                tally.refuse(chunk.source, line, error)
    _check_bad(tally, sources, data)
    return found


# ------------------------------------------------------------------------------------------------------------- layout


def columns_of(sources: Sequence[files.Source], limit: int | None) -> list[str]:
    """The columns of all rows, as the files name them."""
    rows = (row for chunk in files.chunks(sources, limit) for _, row in chunk.rows() if isinstance(row, dict))
    return list(dict.fromkeys(name for row in rows for name in row))


def layout_of(columns: Iterable[str], data: Data) -> tuple[str, str]:
    """The layout and why, from the file's names of all columns: it must not hang on which row comes first."""
    columns = list(columns)
    if data.format == "auto":
        if not columns:  # nothing but bad rows: any layout lets them be reported
            return "messages", "no readable row"
        layout, reason = formats.detect(columns, data.columns)
    else:
        layout, reason = data.format, "set in the recipe"
        if columns:
            formats.check_columns(columns, layout, data.columns)
    if layout == "text" and data.system is not None:
        raise DataError(
            "data.system is set, but rows of plain text have no place for a system message.",
            "Remove data.system, or give the rows as prompt and completion.",
        )
    if layout != "prompt-completion" and data.train_on == "completion":
        raise DataError(
            f"data.train_on is completion, but rows of layout {layout} do not say where their prompt ends.",
            "Take assistant, last or all, or give the rows as prompt and completion.",
        )
    return layout, reason


def _whole(row: dict[str, Any] | BadRow) -> dict[str, Any]:
    if isinstance(row, BadRow):
        raise row
    return row


# ------------------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class _Loaded:
    """All rows of some sources, finished."""

    rows: Rows
    about: dict[str, Any]
    weights: list[float]  # of each source
    said: list[str]


def _load(names: dict[str, float], data: Data, tokenizer: Any, limit: int | None) -> _Loaded:
    groups = [files.find(name) for name in names]
    sources = files.find(list(names)) if len(names) > 1 else groups[0]  # together, so that a file named twice is seen
    weights = [weight for group, weight in zip(groups, names.values(), strict=True) for _ in group]
    prints = [(source.name, source.fingerprint() or "") for source in sources]

    def make(path: Path) -> dict[str, Any]:
        about = _write(path, sources, data, tokenizer, limit)
        for file, (_, found) in zip(about["files"], prints, strict=True):
            file["sha256"] = found or None
        return about

    def where(source: int, line: int) -> str:
        return sources[source].where(line)

    if all(found for _, found in prints):
        path, about, there = data_cache.cached(data_cache.key_of(prints, data, tokenizer, limit), make)
        said = [f"The prepared rows come from {path.parent}."] if there else []
        return _Loaded(Rows.open(path, where), about, weights, said)
    with tempfile.TemporaryDirectory(prefix="finetune-rows-") as folder:  # a stream has no content to know it by
        path = Path(folder) / data_cache.ROWS
        about = make(path)
        said = [source.note for source in sources if source.note]
        return _Loaded(Rows.open(path, where), about, weights, said)  # what is mapped stays until it is let go


def _write(
    path: Path, sources: Sequence[files.Source], data: Data, tokenizer: Any, limit: int | None
) -> dict[str, Any]:
    """Finish all rows of the sources into a file; raise for every policy that says stop, and when none is left."""
    layout, reason = _first_guess(sources, data, limit)
    while True:
        tally, told = Tally(), time.monotonic()
        with Writer(path) as file:
            for part in encode_chunks(Job(tokenizer, layout, data), files.chunks(sources, limit)):
                file.write(part.batch)
                tally.add(part.tally)
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    _log.info("  %s rows prepared so far", f"{tally.read.total():,}")
        better, reason = layout_of(tally.columns, data)
        if better == layout:
            break
        layout = better  # a later row had a column that the first ones lacked
    _check_bad(tally, sources, data)
    _check_lengths(tally, sources, data)
    if data.eval_group is not None and data.eval_group not in tally.columns:
        raise DataError(
            f"data.eval_group names the column '{data.eval_group}', which is in no row.",
            f"Name one of {', '.join(tally.columns)}.",
        )
    return _about(tally, sources, data, layout, reason)


def _first_guess(sources: Sequence[files.Source], data: Data, limit: int | None) -> tuple[str, str]:
    """The layout by the first rows; where they don't tell, by all."""
    first = next(files.chunks(sources, limit), None)
    rows = [row for _, row in first.rows() if isinstance(row, dict)] if first else []
    try:
        return layout_of(dict.fromkeys(name for row in rows for name in row), data)
    except DataError:
        return layout_of(columns_of(sources, limit), data)


def _check_bad(tally: Tally, sources: Sequence[files.Source], data: Data) -> None:
    count, read = tally.bad.total(), tally.read.total()
    if not count or (data.on_bad_row == "skip" and count < read):
        return
    kinds = ", ".join(f"{number} {kind}" for kind, number in tally.bad.most_common())
    listed = "".join(f"\n  {line}" for line in _bad_rows(tally, sources))
    more = f"\n  and {count - len(tally.bad_rows)} more" * (count > len(tally.bad_rows))
    raise DataError(
        f"{count} of {read} rows cannot be trained ({kinds}):{listed}{more}\n",
        "Correct them, or set data.on_bad_row: skip to leave them out and count them."
        if count < read
        else "Correct them; with none left there is nothing to train.",
    )


def _bad_rows(tally: Tally, sources: Sequence[files.Source]) -> list[str]:
    return [f"{sources[source].where(line)}: {reason}" for source, line, reason in tally.bad_rows]


def _check_lengths(tally: Tally, sources: Sequence[files.Source], data: Data) -> None:
    read, (length, source, line) = tally.read.total(), tally.longest
    if tally.overlong and data.overlong == "error":
        ends = sorted(tally.over)
        bars = "".join(f"\n  up to {end * data.max_length // 8:>7,}: {tally.over[end]:,}" for end in ends[:12])
        if beyond := sum(tally.over[end] for end in ends[12:]):
            bars += f"\n  longer: {beyond:,}"
        raise DataError(
            f"{tally.overlong} of {read} rows are longer than data.max_length {data.max_length} tokens; the "
            f"longest has {length} ({sources[source].where(line)}).{bars}\n",
            f"Set data.max_length to {length}, or data.overlong to drop, truncate-prompt, truncate-end or split.",
        )
    if not tally.kept.total():
        names = ", ".join(found.name for found in sources)
        raise DataError(
            f"No row of {names} is left to train: {read} read, {tally.bad.total()} bad, {tally.dropped} dropped as "
            f"longer than data.max_length {data.max_length} (up to {length}).",
            "Raise data.max_length, or correct the rows." if read else "Put rows into the file.",
        )


def _about(tally: Tally, sources: Sequence[files.Source], data: Data, layout: str, reason: str) -> dict[str, Any]:
    length, source, line = tally.longest
    return {
        "format": layout,
        "format_reason": reason,
        "files": [
            {"name": found.name, "rows_read": tally.read[number], "rows_kept": tally.kept[number]}
            for number, found in enumerate(sources)
        ],
        "rows_read": tally.read.total(),
        "rows_bad": dict(tally.bad.most_common()),
        "bad_rows": _bad_rows(tally, sources),
        "rows_overlong": tally.overlong,
        "rows_dropped": tally.dropped,
        "rows_cut": tally.cut,
        "rows_split": tally.split,
        "tokens_lost": tally.tokens_lost,
        "trained_tokens_lost": tally.trained_lost,
        "longest_read": length,
        "longest_at": sources[source].where(line) if length else None,
        "max_length": data.max_length,
        # The system message that every row has, which a chat with the trained model then starts with.
        "system": next(iter(tally.systems)) if len(tally.systems) == 1 else None,
    }


# ---------------------------------------------------------------------------------------- splits, weights, duplicates


def _split(rows: Rows, data: Data) -> tuple[Rows, Rows]:
    """Hold out the rows whose hash, read as a fraction of all hashes, lies below the share.

    Equal rows (and rows of one group) have equal hashes, so they are never on both sides, and other rows don't move
    them. Where that leaves a side empty, the rows with the lowest (or highest) hash go there.
    """
    import numpy as np

    share, keys = float(str(data.eval)), rows.column("key")
    if len(rows) == 0 or keys.min() == keys.max():
        what = "one to train on" if data.eval_group is None else f"one value of {data.eval_group}"
        raise DataError(
            f"data.eval {data.eval} wants rows held out, but there is only {what}.",
            "Give more rows, a file with evaluation rows, or data.eval: none.",
        )
    held = keys < np.uint64(min(int(share * 2**64), 2**64 - 1))
    held |= keys == keys.min() if not held.any() else False
    held &= keys != keys.max()
    return rows.take(np.flatnonzero(~held)), rows.take(np.flatnonzero(held))


def _weighted(rows: Rows, weights: Sequence[float], seed: int) -> Rows:
    """Each row as often as its source weighs: 2 is twice, 0.5 every other, drawn by the row's hash and the seed."""
    import numpy as np

    if set(weights) == {1.0}:
        return rows
    source, digest = rows.column("source"), rows.column("digest")
    weight = np.asarray(weights)[source]
    # Another hash than the one that splits, or a held-out share would lie in the drawn one or beside it as a whole.
    drawn = (digest ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    drawn ^= drawn >> np.uint64(32)
    times = np.floor(weight).astype(np.int64) + (drawn.astype(np.float64) / 2**64 < weight % 1)
    if not times.any():
        raise DataError("The weights of data.train leave no row to train.", "Raise them, or give more rows.")
    return rows.take(np.repeat(np.arange(len(rows)), times))


def _copies(rows: Rows) -> int:
    import numpy as np

    return len(rows) - len(np.unique(rows.column("digest")))


def _also_in(held: Rows, train: Rows) -> int:
    import numpy as np

    return int(np.isin(np.unique(held.column("digest")), train.column("digest")).sum())


def _token_counts(rows: Rows) -> dict[str, Any]:
    tokens, trained = rows.tokens, rows.trained_tokens
    return {
        "tokens": tokens,
        "trained_tokens": trained,
        "trained_share": round(trained / tokens, 4),
        "longest": int(rows.lengths.max()),
    }
