"""How long the rows are that will be trained, in the model's own tokens: what a plan asks of the data.

A file of many rows is read whole and every n-th row is tokenised, so that a sorted file gives a fair picture too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from finetune import chat, embedded, files, formats, hub_headers
from finetune.data import layout_of
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.model import load_tokenizer
from finetune.overlong import supervised
from finetune.packing import packs
from finetune.paths import Lengths
from finetune.recipe import Recipe

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
    pairs = [(len(row.input_ids), supervised(row)) for row in found]
    if not pairs:
        raise DataError(f"None of the {rows} rows of {names} can be trained.", "Look at them with `finetune data`.")
    if data.packing is True:
        return _packed(pairs, names, rows, data.max_length, recipe.train.seed)
    return Lengths.read(pairs, names, rows)


def _packed(pairs: list[tuple[int, int]], names: str, rows: int, max_length: int, seed: int) -> Lengths:
    """The same of packs; a longer row would be cut or stop the training, so it counts as a full pack."""
    pairs = [(min(tokens, max_length), min(trained, max_length)) for tokens, trained in pairs]
    bins = packs([tokens for tokens, _ in pairs], max_length, seed)
    whole = [(sum(pairs[row][0] for row in pack), sum(pairs[row][1] for row in pack)) for pack in bins]
    return Lengths.read(whole, names, max(len(bins), rows * len(bins) // len(pairs)))


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
