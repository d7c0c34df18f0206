"""Finished rows -> the micro-batches of a run: which rows come when, and the tensors of each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

# Imported by `train` only, when training starts.
from torch.utils.data import Sampler  # noqa: TID253
from transformers import TrainerCallback  # noqa: TID253
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: TID253

from finetune.chat import IGNORE, Encoded
from finetune.data import Prepared
from finetune.packing import epoch_order
from finetune.paths import WORTH_SHARING
from finetune.recipe import Fast, Train

if TYPE_CHECKING:
    from datasets import Dataset


def numbered(rows: range) -> Dataset:
    """What the trainer holds of the rows: their numbers. `Collator` reads the rows themselves."""
    from datasets import Dataset

    return Dataset.from_dict({"row": rows})


class Collator:
    """Numbers of rows -> the tensors of one micro-batch. Evaluation rows are numbered last.

    `apart`: attention runs row by row (`fast.attention`), so `laid_out` may leave out what changes nothing; otherwise
    TRL's collator makes the batch, and lays the rows end to end if it is `flat`.
    """

    def __init__(self, data: Prepared, tokenizer: Any, *, flat: bool, apart: Fast | None = None) -> None:
        self._train, self._eval, self._apart = data.train, data.eval, apart
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._collate = DataCollatorForLanguageModeling(pad_token_id=pad or 0, padding_free=flat)

    def __call__(self, examples: Sequence[dict[str, int]]) -> dict[str, Any]:
        numbers = [example["row"] for example in examples]
        rows, first = self._train, len(self._train)
        if numbers[0] >= first and self._eval is not None:
            rows, numbers = self._eval, [number - first for number in numbers]
        if self._apart is not None:
            return laid_out(rows.whole(numbers), prefix=self._apart.prefix, tail=self._apart.tail)
        columns = rows.examples(numbers)
        batch: dict[str, Any] = self._collate(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        )
        return batch


def laid_out(rows: Sequence[Encoded], *, prefix: bool = True, tail: bool = True) -> dict[str, Any]:
    """Rows end to end in one, without the tokens that change neither loss nor gradient.

        prefix    what all rows begin with stands once, before them, as far as no token of it gives a loss
        tail      what comes after the last token that predicts a label is left out

    `input_ids`, `position_ids` and `shift_labels` (the label that a token predicts) are [1, tokens], `cu_seq_lens_q`
    says where the rows begin, the first of them behind what they share. `row_tokens` counts the tokens of the rows.
    """  # fmt: skip
    import torch

    kept: list[tuple[list[int], list[int]]] = []
    free = []  # tokens of each row in front of the first that predicts a label
    for row in rows:
        predicts = [*row.labels[1:], IGNORE]
        where = [n for n, label in enumerate(predicts) if label != IGNORE]
        end = (where[-1] + 1 if where else 1) if tail else len(predicts)
        kept.append((row.input_ids[:end], predicts[:end]))
        free.append(where[0] if where else end - 1)
    shared = _alike([ids for ids, _ in kept], min(free)) if prefix else 0
    if shared * (len(rows) - 1) < WORTH_SHARING:
        shared = 0
    ids, labels, positions, ends = kept[0][0][:shared], [IGNORE] * shared, [*range(shared)], [shared]
    for row_ids, row_labels in kept:
        ids, labels = [*ids, *row_ids[shared:]], [*labels, *row_labels[shared:]]
        positions += range(shared, len(row_ids))
        ends.append(len(ids))
    shift_labels = torch.tensor([labels])
    return {
        "input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]),
        "labels": shift_labels, "shift_labels": shift_labels, "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32),
        "row_tokens": torch.tensor(sum(len(row.input_ids) for row in rows)),
    }  # fmt: skip


def _alike(rows: Sequence[Sequence[int]], most: int) -> int:
    """How many tokens all rows begin with, `most` at most."""
    first = rows[0][:most]
    for row in rows[1:]:
        first = first[: next((n for n, (a, b) in enumerate(zip(first, row, strict=False)) if a != b), len(first))]
    return min(len(first), *map(len, rows))


class EpochOrder(Sampler[int]):
    """The order of each epoch: `packing.epoch_order` with the recipe's seed and the number of the epoch.

    A resumed run skips the batches that were trained, so its order must be the same: `Epochs` tells it the epoch.
    """

    def __init__(self, lengths: Any, train: Train, *, flat: bool) -> None:
        self._lengths, self._train, self._flat = lengths, train, flat
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes; accelerate calls it too, but misses a resumed run of several processes."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self._of(self.epoch))

    def _of(self, epoch: int) -> list[int]:
        train, micro = self._train, int(self._train.micro_batch)
        return epoch_order(self._lengths, train.batch_size, micro, flat=self._flat, seed=train.seed, epoch=epoch)

    def rows_of(self, step: int) -> list[int]:
        """The rows of an optimizer step of the run, counted from 1."""
        each = self._train.batch_size
        epoch, number = divmod(step - 1, -(-len(self) // each))
        return self._of(epoch)[number * each : (number + 1) * each]


class Epochs(TrainerCallback):
    """Tells the order which epoch begins."""

    def __init__(self, order: EpochOrder) -> None:
        self._order = order

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._order.set_epoch(int((state.epoch or 0) + 1e-6))
