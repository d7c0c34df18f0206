"""How long the rows are that will be trained, in the model's own tokens: what a plan asks of the data.

A file of many rows is read whole and every n-th row is tokenised, so that a sorted file gives a fair picture too.
"""

from __future__ import annotations

from pathlib import Path

from finetune import chat, embedded, files, formats, hub_headers
from finetune.data import layout_of
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.model import load_tokenizer
from finetune.paths import Lengths
from finetune.recipe import Recipe

SAMPLE = 1000


def read_lengths(recipe: Recipe, source: str | list[str] | None = None, sample: int = SAMPLE) -> Lengths:
    """Lengths of the rows of `source` (default: the recipe's training data), of about `sample` of them.

    Rows that cannot be trained are left out here; `train` judges them. Raises `DataError` when none can.
    """
    tokenizer = load_tokenizer(recipe)
    sources = files.find(source or list(recipe.data.sources))
    layout, _ = layout_of(sources, recipe.data, recipe.data.limit)
    total = sum(1 for _ in files.rows(sources, recipe.data.limit))
    every = max(1, total // sample)
    pairs = []
    for number, (_, row) in enumerate(files.rows(sources, recipe.data.limit)):
        if number % every or isinstance(row, BadRow):
            continue
        try:
            encoded = chat.encode(tokenizer, formats.to_messages(row, layout, recipe.data.system))
        except BadRow:
            continue
        trained = len(encoded.labels[1:]) - encoded.labels[1:].count(chat.IGNORE)
        pairs.append((len(encoded.input_ids), trained))
    if not pairs:
        names = ", ".join(found.name for found in sources)
        raise DataError(f"None of the {total} rows of {names} can be trained.", "Look at them with `finetune train`.")
    return Lengths.read(pairs, ", ".join(found.name for found in sources), total)


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
