"""The rows of a recipe as `train` would take them, to look at: from all of them down to one token.

    Recipe -> take -> Taken     the prepared rows, or where `train` would stop, all that can be read and why it stops
    Taken  -> ask  -> Asked     one row of the files: what stands there, and what becomes of it

No weights are read, only the tokenizer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from finetune import chat, files, formats
from finetune.chat import Encoded
from finetune.data import Prepared, prepare
from finetune.duplicates import Side
from finetune.errors import DataError, InputError
from finetune.formats import BadRow
from finetune.overlong import supervised
from finetune.pieces import Piece, Speller
from finetune.recipe import Data, Recipe

_ENDLESS = 2**30  # tokens; no row is longer


@dataclass(frozen=True)
class Shown:
    """One row as the model sees it."""

    place: str
    side: str  # "trained" or "held out"
    row: Encoded
    pieces: tuple[Piece, ...]
    marks: tuple[str, ...] = ()  # "copy", "long"

    @property
    def trained(self) -> int:
        """Tokens that give a loss."""
        return supervised(self.row)

    def document(self) -> dict[str, Any]:
        """For `--json`; `pieces` are [text, how many tokens]."""
        pieces = [[piece.text, len(piece.ids)] for piece in self.pieces]
        where = {"place": self.place, "side": self.side, "marks": list(self.marks)}
        return {**where, "ids": self.row.input_ids, "labels": self.row.labels, "pieces": pieces}


@dataclass(frozen=True)
class Asked:
    """The row that `--row` asks for: what stands in the file, and what becomes of it."""

    number: int
    place: str
    verdict: str
    raw: Any = None  # the row as it stands in the file, where it could be read
    messages: list[Any] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    shown: tuple[Shown, ...] = ()  # nothing when it is left out, several when it is split

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        raw = json.loads(json.dumps(self.raw, default=str))  # a Parquet file may hold dates and bytes
        return {**vars(self), "raw": raw, "shown": [row.document() for row in self.shown]}


@dataclass(frozen=True)
class Taken:
    """The rows of a recipe as `train` would take them, unpacked."""

    recipe: Recipe
    tokenizer: Any
    speller: Speller
    prepared: Prepared
    train: Side
    held: Side | None
    lengths: dict[str, int]  # tokens at the percentiles "50", "90" and "99", and "max"
    refusal: DataError | None  # why `train` would stop

    def shown(self, side: Side, index: int, marks: tuple[str, ...] = ()) -> Shown:
        """One row for a person to look at."""
        row = side.rows[index]
        length, lengths = len(row.input_ids), self.lengths
        long = length > self.recipe.data.max_length or length > max(lengths["90"], 2 * lengths["50"])
        pieces = tuple(self.speller.pieces(row.input_ids, row.labels))
        return Shown(side.place(index), side.name, row, pieces, marks + ("long",) * long)

    def require_trainable(self) -> None:
        """Raise `DataError` where `train` would stop, in two sentences."""
        if self.refusal is not None:
            what = self.refusal.what.strip().splitlines()[0].rstrip(":.")
            raise DataError(f"Training would stop: {what}.", self.refusal.hint)


def take(recipe: Recipe, tokenizer: Any) -> Taken:
    """Prepare a recipe's rows; where `train` would stop, all that can be read, and why it would stop.

    Raises `DataError` when not even that can be done: a file that isn't there, no row that can be trained.
    """
    data = recipe.data.model_copy(update={"packing": False})
    refusal = None
    try:
        prepared = prepare(recipe.model_copy(update={"data": data}), tokenizer)
    except DataError as error:
        refusal, lenient = error, {"on_bad_row": "skip"}
        if data.overlong == "error":
            data = data.model_copy(update={"max_length": _ENDLESS})
        data = data.model_copy(update=lenient)
        prepared = prepare(recipe.model_copy(update={"data": data}), tokenizer)
    held = Side("held out", prepared.eval) if prepared.eval is not None else None
    lengths = percentiles(prepared.train.lengths)
    train = Side("trained", prepared.train)
    return Taken(recipe, tokenizer, Speller(tokenizer), prepared, train, held, lengths, refusal)


def percentiles(lengths: Any) -> dict[str, int]:
    """The nearest-rank percentiles 50, 90 and 99, and the longest."""
    ordered = sorted(int(length) for length in lengths)
    found = {str(part): ordered[math.ceil(part * len(ordered) / 100) - 1] for part in (50, 90, 99)}
    return {**found, "max": ordered[-1]}


def ask(taken: Taken, number: int) -> Asked:
    """The `number`-th row of the training files, counted from 1, and what becomes of it.

    Raises `InputError` when there are not so many.
    """
    data = taken.recipe.data
    place, raw = _raw(data, number)
    sides = [side for side in (taken.train, taken.held) if side is not None]
    found = [(side, row) for side in sides for row in side.different().tolist() if side.place(row) == place]
    shown = tuple(taken.shown(side, row) for side, row in found)
    try:
        if isinstance(raw, BadRow):
            raise raw
        row = formats.renamed(raw, data.columns)
        talk = formats.to_conversation(row, taken.prepared.counts["format"], data.system)
        [whole] = chat.encode_many(taken.tokenizer, [talk], data.train_on)
        if isinstance(whole, BadRow):
            raise whole
    except BadRow as error:
        raw = None if isinstance(raw, BadRow) else raw
        return Asked(number, place, f"cannot be trained ({error.kind}): {error.reason}", raw)
    length = len(whole.input_ids)
    verdict = (shown[0].side if shown else "left out") + f", {length:,} tokens"
    if length > data.max_length:
        verdict += f", longer than data.max_length {data.max_length:,} (data.overlong: {data.overlong})"
    return Asked(number, place, verdict, raw, talk.messages, talk.tools or [], shown)


def _raw(data: Data, number: int) -> tuple[str, Any]:
    """(place, row) of a row as it stands in the files."""
    sources = files.find(list(data.sources))
    count = 0
    for chunk in files.chunks(sources, data.limit):
        for line, row in chunk.rows():
            count += 1
            if count == number:
                return sources[chunk.source].where(line), row
    raise InputError(f"There is no row {number}; the training data has {count}.", f"Give --row 1 to --row {count}.")


__all__ = ["Asked", "Shown", "Taken", "ask", "percentiles", "take"]
