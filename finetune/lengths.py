"""How long the rows are that will be trained, in the model's own tokens: what a plan asks of the data.

A file of many rows is read whole and every n-th row is tokenised, so that a sorted file gives a fair picture too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from finetune import chat, embedded, files, formats, hub_headers
from finetune.chat import Encoded
from finetune.data import layout_of
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.model import load_tokenizer
from finetune.packing import packs
from finetune.paths import WORTH_SHARING, Lengths
from finetune.recipe import Recipe
from finetune.store import Packs, Rows

SAMPLE = 1000


def read_lengths(recipe: Recipe, source: str | list[str] | None = None, sample: int = SAMPLE) -> Lengths:
    """Lengths of the rows of `source` (default: the recipe's training data), of about `sample` of them.

    Rows that cannot be trained are left out here; `train` judges them. Raises `DataError` when none can.
    """
    data = recipe.data
    tokenizer = load_tokenizer(recipe)
    sources = files.find(source or list(data.sources))
    names = ", ".join(found.name for found in sources)
    columns: dict[str, None] = {}
    kept: list[dict[str, Any]] = []
    rows, every = 0, 1
    for row in (row for chunk in files.chunks(sources, data.limit) for _, row in chunk.rows()):
        if not isinstance(row, BadRow):
            columns.update(dict.fromkeys(row))
            if rows % every == 0:
                kept.append(row)
        rows += 1
        if len(kept) > 2 * sample:  # memory stays flat, and the sample even, whatever the size of the file
            kept, every = kept[::2], 2 * every
    layout, _ = layout_of(columns, data)
    talks = []
    for row in kept:
        with contextlib.suppress(BadRow):
            talks.append(formats.to_conversation(formats.renamed(row, data.columns), layout, data.system))
    found = [row for row in chat.encode_many(tokenizer, talks, data.train_on) if not isinstance(row, BadRow)]
    if not found:
        raise DataError(f"None of the {rows} rows of {names} can be trained.", "Look at them with `finetune data`.")
    if data.packing is True:
        return _packed(found, names, rows, data.max_length, recipe.train.seed)
    return of_rows(Rows.of(found), names, rows)


def of_rows(rows: Rows, source: str, of: int | None = None) -> Lengths:
    """Lengths of finished rows, and what of them runs when they are laid end to end."""
    ends, shared = rows.laid_out()
    if isinstance(rows, Packs):  # whose rows share their beginning too, where that is worth it
        spared = [shared * (len(pack) - 1) for pack in rows.packs]
        ends = [
            sum(ends[row] for row in pack) - (less if less >= WORTH_SHARING else 0)
            for pack, less in zip(rows.packs, spared, strict=True)
        ]
    return Lengths.read(rows.pairs, source, of, ends, shared)


def _packed(rows: list[Encoded], names: str, of: int, max_length: int, seed: int) -> Lengths:
    """The same of packs; a longer row would be cut or stop the training, so it counts as a full pack."""
    cut = Rows.of([Encoded(row.input_ids[:max_length], row.labels[:max_length]) for row in rows])
    bins = packs(cut.lengths, max_length, seed)
    return of_rows(Packs(cut, bins), names, max(len(bins), of * len(bins) // len(rows)))


def at_hand(recipe: Recipe) -> bool:
    """Whether the recipe's rows and its tokenizer lie on this machine, so that reading them asks nobody."""
    local = all(
        Path(name).exists() if Path(name).is_absolute() else any(Path().glob(name)) for name in recipe.data.sources
    )
    if not local:
        return False
    if recipe.model in embedded.NAMES or Path(recipe.model).expanduser().exists():
        return True
    return hub_headers.cached_config(recipe.model, recipe.load.revision) is not None
