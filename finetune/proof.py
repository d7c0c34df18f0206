"""Does the merged folder answer as base plus adapter? Both are run in float32 on the same rows and compared.

    base + adapter            by peft, nothing merged                             what was trained
    base + adapter, rounded   by peft's own merge, each weight rounded            what a right merge must hold
    merged                    the folder alone, as a server reads it

Merged and rounded must agree to the last digits of float32: a weight left out, added twice, scaled wrongly or tied
to another shows here. Merged and unrounded differ by what a 16-bit type costs, which is measured and told.

The models are built without weights, and each module reads its own from the files for the moment it runs, so the
memory is that of the largest module, whatever the model's size. transformers and peft compute; this file only feeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import FinetuneError
from finetune.merge_layout import FourBits, Weighted
from finetune.streamed import (
    Files,
    NotProvable,
    empty_model,
    feed,
    first_line,
    give_back_freed_memory,
    twins_of,
    with_adapters,
)
from finetune.weight_files import FLOATS, read_model

if TYPE_CHECKING:
    import torch

ROWS = 4
"""Rows that are compared."""

ROW = 48
"""Tokens of one row; of a longer one the first are taken."""

PLACES = 16
"""Places of each row, spread over it, whose logits are compared."""

TOLERANCE = 1e-3
"""Largest difference, beside a largest logit of 1, that float32 itself explains."""


@dataclass(frozen=True)
class Proof:
    """What was compared, in `places` places of `rows` rows.

    `difference` is the largest between the merged folder's logits and those of base + adapter with each weight
    rounded as the folder's; `rounding` the largest to base + adapter as it is, and `same` in how many places the
    most likely token is the same. `trained` and `trained_same` are the same two beside the 4-bit base of the
    training. `largest` is the largest logit.
    """

    rows: int
    places: int
    largest: float
    difference: float
    rounding: float
    same: int
    trained: float | None = None
    trained_same: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the folder holds what it should; false for NaN."""
        return self.difference <= TOLERANCE * max(1.0, self.largest)

    def sentence(self) -> str:
        """The proof in words."""
        rounds = self.rounding > 2 * self.difference and self.rounding > 1e-4
        moved = f"; rounding to its type moves them by up to {self.rounding:.2g}" if rounds else ""
        return (
            f"Proved on {self.rows} rows: logits equal base + adapter to {self.difference:.1g} of {self.largest:.3g}"
            f"{moved}; the most likely token is the same in {self.same} of {self.places} places."
        )


def prove(
    base: Path,
    adapters: Sequence[Weighted],
    merged: Path,
    rows: Sequence[Sequence[int]],
    *,
    used: Mapping[str, FourBits] | None = None,
    trained: Mapping[str, FourBits] | None = None,
) -> Proof:
    """Run `merged` against `base` with `adapters` on `rows` of token ids.

    `used` names the 4-bit weights that the merge was made from, `trained` those that the adapter was trained beside.
    Raises `NotProvable` where transformers cannot run the model from its files, `FinetuneError` when it does not
    answer as base + adapter.
    """
    import torch

    taken = take(rows)
    if not taken:
        raise NotProvable("there are no rows")
    give_back_freed_memory()
    sizes = {tensor.name: tensor.dtype for shard in read_model(merged) for tensor in shard.tensors.values()}
    with torch.inference_mode():
        got = _answers(Files(merged), merged, (), taken)
        files = Files(base, adapters, four_bits=used or {})
        plain = _answers(files, base, adapters, taken, like=merged)
        rounded = plain
        if any(dtype in FLOATS and dtype != "F32" for dtype in sizes.values()):
            rounded = _answers(replace(files, rounded=sizes), base, adapters, taken, like=merged)
        found = Proof(
            rows=len(taken),
            places=len(got),
            largest=float(rounded.abs().max()),
            difference=_largest(got, rounded),
            rounding=_largest(got, plain),
            same=_same(got, plain),
        )
        if trained is not None:
            other = plain
            if trained != (used or {}):
                other = _answers(replace(files, four_bits=trained), base, adapters, taken, like=merged)
            found = replace(found, trained=_largest(got, other), trained_same=_same(got, other))
    if not plain.isfinite().all():
        raise FinetuneError(
            f"Base + adapter gives NaN or infinity on {found.rows} rows, so there is nothing to compare with.",
            "The merged model was removed. The weights of the base are broken: download it again.",
        )
    if not found.passed:
        raise FinetuneError(
            f"The merged model does not answer as base + adapter: on {found.rows} rows its logits differ by up to "
            f"{found.difference:.2g} (of {found.largest:.3g}), and the most likely token is the same in {found.same} "
            f"of {found.places} places.",
            "It was removed. Check that base and adapter have not changed meanwhile, and merge again.",
        )
    return found


def take(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first tokens of some rows, all of one length; the longer ones are preferred to short ones."""
    longest = max((len(row) for row in rows), default=0)
    good = [row for row in rows if 2 * len(row) >= min(longest, ROW)][:ROWS]
    width = min([ROW, *map(len, good)])
    return [[int(token) for token in row[:width]] for row in good]


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _same(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one.argmax(-1) == other.argmax(-1)).sum())


def _answers(
    files: Files, folder: Path, adapters: Sequence[Weighted], rows: Sequence[Sequence[int]], like: Path | None = None
) -> torch.Tensor:
    """Logits [places, vocabulary] at the compared places of the rows, float32."""
    import torch

    try:
        model, prefix = empty_model(folder, like)
        if adapters:
            model = with_adapters(model, adapters)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise NotProvable(f"transformers cannot build it ({first_line(error)})") from None
    feed(model, replace(files, prefix=prefix, twins=twins_of(model)), adapters)
    places = list(range(len(rows[0])))[:: -max(len(rows[0]) // PLACES, 1)][:PLACES]
    head = model.get_output_embeddings()
    if fewer := type(head) is torch.nn.Linear:  # the logits of all places would be larger than any module
        whole = head.forward
        setattr(head, "forward", lambda values: whole(values[:, places]))  # noqa: B010  (types know a method)
    try:
        logits: torch.Tensor = model(input_ids=torch.tensor(rows), use_cache=False).logits
        logits = (logits if fewer else logits[:, places]).flatten(0, 1).float()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise NotProvable(f"its modules read each other's weights ({first_line(error)})") from None
    return logits
