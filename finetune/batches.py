"""Finished rows -> the micro-batches of a run: which rows come when, and the tensors of each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

# Imported by `train` only, when training starts.
from torch.utils.data import Sampler  # noqa: TID253
from transformers import TrainerCallback  # noqa: TID253
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: TID253

from finetune.data import Prepared
from finetune.packing import epoch_order
from finetune.recipe import Train

if TYPE_CHECKING:
    from datasets import Dataset


def numbered(rows: range) -> Dataset:
    """What the trainer holds of the rows: their numbers. `Collator` reads the rows themselves."""
    from datasets import Dataset

    return Dataset.from_dict({"row": rows})


class Collator:
    """Numbers of rows -> the tensors of one micro-batch, by TRL's collator. Evaluation rows are numbered last."""

    def __init__(self, data: Prepared, tokenizer: Any, *, flat: bool) -> None:
        self._train, self._eval = data.train, data.eval
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._collate = DataCollatorForLanguageModeling(pad_token_id=pad or 0, padding_free=flat)

    def __call__(self, examples: Sequence[dict[str, int]]) -> dict[str, Any]:
        numbers = [example["row"] for example in examples]
        first = len(self._train)
        if numbers[0] < first or self._eval is None:
            columns = self._train.examples(numbers)
        else:
            columns = self._eval.examples([number - first for number in numbers])
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        batch: dict[str, Any] = self._collate(rows)
        return batch


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
