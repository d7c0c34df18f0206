"""What the rows of a recipe are, in numbers, before a GPU is rented: `finetune data`.

    Taken -> look -> Report     lengths, copies, leaks, what all replies have in common, and what stands out

Every row is read twice, once for copies and once for its reply; a million of them take two or three minutes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune import chat, files, near
from finetune.chat import IGNORE, Encoded
from finetune.data import Prepared, read_conversations
from finetune.data_rows import Shown, Taken, percentiles
from finetune.duplicates import Copies, Leak, Prints, Side, copies, leak
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.packing import packs
from finetune.pieces import Speller
from finetune.recipe import Recipe
from finetune.store import Rows

_TAIL = 8  # a longest row of so many medians is shown in bins that double


@dataclass(frozen=True)
class Bin:
    """Rows of `start` to `end` tokens."""

    start: int
    end: int
    rows: int


@dataclass(frozen=True)
class Replies:
    """What the trained parts of the rows have in common: what the model learns to write."""

    rows: int
    begin: str  # what all of them begin with, and in how many tokens
    begin_tokens: int
    end: str
    end_tokens: int
    same: int  # rows with the most frequent reply
    same_text: str
    wordless: int  # without a letter or a digit
    endless: int  # without a token that ends it


@dataclass(frozen=True)
class Report:
    """All numbers."""

    taken: Taken
    histogram: list[Bin]
    longer: int  # rows that are longer than max_length, where `train` would stop at them
    sources: list[dict[str, Any]]
    steps: int
    copies: Copies
    leaks: list[Leak]
    replies: Replies
    notes: list[str]

    @property
    def trained_share(self) -> float:
        """Tokens with a loss of all tokens."""
        return self.taken.train.rows.trained_tokens / self.taken.train.rows.tokens

    @property
    def has_replies(self) -> bool:
        """Whether what is trained are replies, and not all that is said or whole documents."""
        return self.taken.recipe.data.train_on != "all" and self.taken.prepared.counts["format"] != "text"

    def warnings(self) -> list[str]:
        """What somebody should know before paying for a GPU, a sentence or two each."""
        return list(_warnings(self))

    def first(self, count: int) -> list[Shown]:
        """The first trained rows."""
        return [self.shown(self.taken.train, index) for index in range(min(count, len(self.taken.train)))]

    def shown(self, side: Side, index: int) -> Shown:
        """One row, marked where it is a copy."""
        copy = side is self.taken.train and index in self.copies.marked
        return self.taken.shown(side, index, ("copy",) * copy)

    def document(self, first: int = 0) -> dict[str, Any]:
        """For `--json`, with so many of the first rows."""
        taken, rows, refusal = self.taken, self.taken.train.rows, self.taken.refusal
        return {
            "model": taken.recipe.model,
            "refusal": None if refusal is None else {"what": refusal.what, "hint": refusal.hint},
            "rows": {"trained": len(rows), "held_out": len(taken.held or ())},
            "tokens": rows.tokens,
            "trained_tokens": rows.trained_tokens,
            "trained_share": round(self.trained_share, 4),
            "steps_per_epoch": self.steps,
            "lengths": taken.lengths,
            "max_length": taken.recipe.data.max_length,
            "longer": self.longer,
            "histogram": [vars(part) for part in self.histogram],
            "sources": self.sources,
            "copies": self.copies.document(),
            "leaks": [found.document() for found in self.leaks],
            "replies": vars(self.replies),
            "warnings": self.warnings(),
            "notes": self.notes,
            "counts": taken.prepared.counts,
            "first": [row.document() for row in self.first(first)],
        }


def look(taken: Taken) -> Report:
    """Everything about the rows that were taken."""
    recipe, train = taken.recipe, taken.train
    lengths, most = train.rows.lengths, recipe.data.max_length
    longer = int((lengths > most).sum())
    packed = recipe.data.packing is True and not longer
    sequences = len(packs(lengths, most, recipe.train.seed)) if packed else len(train)
    asked, notes = _questions(taken)
    held, prints = {"data.eval": taken.held, "evaluate.data": asked}, Prints.of(train)
    return Report(
        taken,
        histogram(lengths, most),
        longer,
        _sources(taken.prepared, recipe),
        math.ceil(sequences / recipe.train.batch_size),
        copies(prints),
        [leak(name, prints, Prints.of(side)) for name, side in held.items() if side],
        _replies(train.rows, _stops(taken.tokenizer), taken.speller),
        [*taken.prepared.notes, *notes],
    )


def _sources(prepared: Prepared, recipe: Recipe) -> list[dict[str, Any]]:
    """Each file with the rows read, kept, trained and held out."""
    import numpy as np

    found: list[dict[str, Any]] = [dict(file, of="data.train") for file in prepared.counts["files"]]
    apart = isinstance(recipe.data.eval, str)
    evaluated: list[dict[str, Any]] = (
        [dict(file, of="data.eval") for file in prepared.counts["eval"]["files"]] if apart else []
    )
    for rows, name, into in (
        (prepared.train, "trained", found),
        (prepared.eval, "held_out", evaluated if apart else found),
    ):
        if rows is not None:
            for file, count in zip(into, np.bincount(rows.column("source"), minlength=len(into)), strict=True):
                file[name] = int(count)
    return [{"trained": 0, "held_out": 0, **file} for file in found + evaluated]


def _questions(taken: Taken) -> tuple[Side | None, list[str]]:
    """The rows of evaluate.data, where they lie here."""
    recipe = taken.recipe
    if recipe.evaluate is None:
        return None, []
    source = recipe.evaluate.data
    try:
        if any(found.path is None for found in files.find(source)):
            return None, [f"evaluate.data {source} is not on this machine, so the rows are not compared with it."]
        talks = read_conversations(source, recipe.data)
        rows = chat.encode_many(taken.tokenizer, talks, recipe.data.train_on)
    except DataError as error:
        return None, [f"The rows are not compared with evaluate.data {source}: {error}"]
    return Side("asked", Rows.of([row for row in rows if not isinstance(row, BadRow)]), source), []


# ------------------------------------------------------------------------------------------------------------ lengths


def histogram(lengths: Any, max_length: int) -> list[Bin]:
    """Rows by length: up to twelve equal bins of a round width; bins that double where the tail is long.

    A bin ends at `max_length` when rows are longer than that.
    """
    lengths = [int(length) for length in lengths]
    shortest, middle, longest = min(lengths), percentiles(lengths)["50"], max(lengths)
    if longest > _TAIL * middle:
        ends = [2**power for power in range((shortest - 1).bit_length(), (longest - 1).bit_length() + 1)]
        before = ends[0] // 2
    else:
        widths = (part * 10**power for power in range(12) for part in (1, 2, 5))
        width = next(w for w in widths if -(-longest // w) - (shortest - 1) // w <= 12)
        before = (shortest - 1) // width * width
        ends = list(range(before + width, longest + width, width))
    if longest > max_length >= shortest:
        ends = sorted({*ends, max_length})
    counts = Counter(bisect_left(ends, length) for length in lengths)
    return [Bin(start + 1, end, counts[n]) for n, (start, end) in enumerate(zip([before, *ends], ends, strict=False))]


# ------------------------------------------------------------------------------------------------- replies, warnings


def _replies(rows: Iterable[Encoded], stops: set[int], speller: Speller) -> Replies:
    """One pass over the trained tokens of every row."""
    letters: dict[int, bool] = {}
    often: Counter[int] = Counter()
    likely: dict[int, list[int]] = {}  # one row for each of the first replies, to show the most frequent
    count = wordless = endless = 0
    begin: list[int] = []
    end: list[int] = []
    for row in rows:
        reply = [label for label in row.labels if label != IGNORE]
        body = [number for number in reply if number not in speller.special]
        digest = near.digest(reply)
        often[digest] += 1
        if often[digest] == 2 or not likely:
            likely[digest] = reply
        for number in body:
            if number not in letters:
                letters[number] = speller.has_letters(number)
        wordless += not any(letters[number] for number in body)
        endless += stops.isdisjoint(reply)
        turned = body[::-1]
        begin = body if not count else begin[: _shared(begin, body)]
        end = turned if not count else end[: _shared(end, turned)]
        count += 1
    digest, same = often.most_common(1)[0]
    return Replies(
        count, speller.text(begin), len(begin), speller.text(end[::-1]), len(end), same,
        speller.text(likely.get(digest, [])), wordless, endless,
    )  # fmt: skip


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    if other[: len(one)] == one:
        return len(one)
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _stops(tokenizer: Any) -> set[int]:
    """The tokens that end a reply or a document."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        return ends | set(chat.end_of_turn_ids(tokenizer))
    except DataError:  # no template that could carry a chat: then these are documents
        return ends


def _warnings(report: Report) -> Iterator[str]:
    lengths, replies, rows = report.taken.lengths, report.replies, len(report.taken.train)
    if report.trained_share < 0.01:
        yield (
            f"Only {100 * report.trained_share:.2g} % of the tokens give a loss. "
            "Nearly all of the time goes into prompts; shorten them, or check that the replies are whole."
        )
    if lengths["max"] > 10 * lengths["50"]:
        yield (
            f"The longest row has {lengths['max']:,} tokens, {lengths['max'] / lengths['50']:.0f} times the median "
            f"of {lengths['50']:,}. That one decides how much memory a step takes; see data.max_length and "
            "data.overlong."
        )
    if report.has_replies and rows > 2:
        yield from _about_replies(replies)
    if replies.endless:
        yield f"{replies.endless:,} of {rows:,} rows train no end token; from them the model does not learn to stop."
    if report.copies.exact > report.copies.rows / 10:
        yield f"{report.copies.exact:,} of {report.copies.rows:,} rows are exact copies, which weigh the more for it."
    for found in report.leaks:
        if trained := found.same + found.question:
            yield (
                f"{trained:,} of {found.rows:,} rows of {found.name} are trained too, in whole or in their question. "
                "That flatters every score; take them out of one side."
            )
        if found.near:
            yield f"{found.near:,} of {found.rows:,} rows of {found.name} nearly equal a trained row."


def _about_replies(replies: Replies) -> Iterator[str]:
    rows = replies.rows
    if replies.same > rows / 2:
        yield f"{replies.same:,} of {rows:,} rows have the same reply, {_quoted(replies.same_text)}."
    elif replies.begin_tokens >= 3:
        yield f"All {rows:,} replies begin with {_quoted(replies.begin)}, {replies.begin_tokens} tokens."
    if replies.end_tokens >= 3 and replies.same <= rows / 2:
        yield f"All {rows:,} replies end with {_quoted(replies.end)}, {replies.end_tokens} tokens."
    if replies.wordless > rows / 2:
        yield f"{replies.wordless:,} of {rows:,} replies hold no letter and no digit."


def _quoted(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[: most - 1] + "…")


__all__ = ["Bin", "Replies", "Report", "histogram", "look"]
