"""Everything above -> one `SFTTrainer`. The only place where recipe names meet TRL's names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Imported by `train` only, when training starts.
from torch.utils.data import Sampler  # noqa: TID253
from transformers import TrainerCallback  # noqa: TID253
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]  # noqa: TID253
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: TID253

from finetune.callbacks import Clock, FiniteLoss, Interrupt, Measure, Progress, Record
from finetune.data import Prepared
from finetune.device import Device
from finetune.errors import FinetuneError, InputError
from finetune.fast.head import IGNORED, supervised_loss
from finetune.model import trained_in_fp32, training_device
from finetune.packing import epoch_order
from finetune.paths import lies_flat
from finetune.recipe import Recipe, Train
from finetune.run import Run

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


class Trainer(SFTTrainer):
    """SFTTrainer that keeps trained parameters in fp32 and writes nothing beside the checkpoints."""

    model: Any

    def __init__(
        self, *args: Any, clock: Clock, progress: Progress, measure: Measure, order: EpochOrder, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.order = order
        self.clock, self.progress, self.measure = clock, progress, measure
        self.tokens_before = 0  # tokens trained before this process took over
        trained_in_fp32(self.model)

    def fit(self, checkpoint: Path | None) -> float:
        """Train, from a checkpoint if one is given, and return the mean loss over all steps of the run.

        Raises `FinetuneError` when the memory does not suffice.
        """
        import torch
        from transformers import TrainerState

        try:
            if checkpoint is None:
                self.train()
            else:
                state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
                counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
                self._total_train_tokens = self.tokens_before = int(counts[-1]) if counts else 0
                if state.global_step < state.max_steps:
                    self.train(resume_from_checkpoint=str(checkpoint))
                else:  # it was stopped after the last step; transformers would train one more
                    self._load_from_checkpoint(str(checkpoint))
                    self.state = state
            return self._mean_loss()
        except torch.OutOfMemoryError as error:
            raise FinetuneError(
                f"The device ran out of memory at step {self.state.global_step + 1} ({str(error).splitlines()[0]}).",
                "Lower train.micro_batch or data.max_length, or set train.checkpointing: true.",
            ) from None
        finally:
            self.progress.close()

    def _mean_loss(self) -> float:
        """Mean over steps: a log entry stands for the steps since the one before it."""
        logged = [(entry["step"], entry["loss"]) for entry in self.state.log_history if "loss" in entry]
        steps = [step for step, _ in logged]
        weights = [step - before for step, before in zip(steps, [0, *steps], strict=False)]
        return sum(w * loss for w, (_, loss) in zip(weights, logged, strict=True)) / max(1, sum(weights))

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The loss per label, whatever the batches: a mean of batch means would hang on micro_batch and layout."""
        import torch

        self._evaluated = [0.0, 0.0]
        output: Any = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        sums = self.accelerator.reduce(torch.tensor(self._evaluated, device=self.args.device), reduction="sum")
        output.metrics[f"{metric_key_prefix}_loss"] = float(sums[0] / sums[1].clamp(min=1))
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        labels = int((inputs["labels"][:, 1:] != IGNORED).sum())
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        self._evaluated[0] += float(loss) * labels
        self._evaluated[1] += labels
        return loss, *rest

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """On a CPU, the loss on supervised rows; TRL's own head would score every position there."""
        if self.model.training:
            self.measure.saw(inputs)
        if return_outputs or self.args.device.type != "cpu":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = supervised_loss(model, inputs, num_items_in_batch)
        if self.model.training:
            self._total_train_tokens += self._tokens(inputs)
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]
        # Labels are counted over all processes, and DistributedDataParallel averages the gradients of them.
        return loss * self.accelerator.num_processes if num_items_in_batch is not None else loss

    def _tokens(self, inputs: dict[str, Any]) -> int:
        """Tokens of this micro-batch over all processes, padding not counted."""
        import torch

        mask = inputs.get("attention_mask")
        count = mask.sum() if mask is not None else torch.tensor(inputs["input_ids"].numel())
        return int(self.accelerator.gather(count).sum())

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler[int]:
        return self.order

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No README in every checkpoint."""


class Epochs(TrainerCallback):
    """Tells the order which epoch begins."""

    def __init__(self, order: EpochOrder) -> None:
        self._order = order

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._order.set_epoch(int((state.epoch or 0) + 1e-6))


def build_trainer(
    recipe: Recipe,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Prepared,
    run: Run,
    device: Device,
    interrupt: Interrupt,
) -> Trainer:
    """The trainer of a resolved recipe. Raises `FinetuneError` when fewer processes train than were started."""
    from transformers.trainer_callback import PrinterCallback

    if "tensorboard" in recipe.train.report_to:  # its files belong beside the metrics, not among the checkpoints
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
    flat = lies_flat(recipe)
    config = sft_config(recipe, run, device, evaluates=data.eval is not None)
    if config.n_gpu > 1:
        raise InputError(
            f"{config.n_gpu} cards are visible to one process, which would split its batches over them.",
            "Set CUDA_VISIBLE_DEVICES to one card, or start a process per card with `finetune launch`.",
        )
    clock, measure = Clock(), Measure(device.kind)
    progress = Progress(clock)
    order = EpochOrder(data.train.lengths, recipe.train, flat=flat)
    trainer = Trainer(
        clock=clock,
        progress=progress,
        measure=measure,
        model=model,
        args=config,
        order=order,
        train_dataset=_numbers(range(len(data.train))),
        eval_dataset=_numbers(range(len(data.train), len(data.train) + len(data.eval))) if data.eval else None,
        data_collator=Collator(data, tokenizer, flat=flat),
        processing_class=tokenizer,
        callbacks=[
            clock,
            measure,
            interrupt,
            FiniteLoss(run),
            Epochs(order),
            Record(run, recipe.train.keep, clock),
            progress,
        ],
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.accelerator.num_processes != device.count:
        raise FinetuneError(
            f"{device.count} processes were started but {trainer.accelerator.num_processes} train together.",
            "Start them with `finetune launch`, or see 'Several processes' in the README.",
        )
    return trainer


def check_trackers(recipe: Recipe) -> None:
    """Raise `InputError` when an experiment tracker of the recipe is not installed."""
    missing = [name for name in recipe.train.report_to if find_spec(name) is None]
    if missing:
        raise InputError(
            f"train.report_to names {' and '.join(missing)}, not installed here.",
            f"Run `pip install {' '.join(missing)}`.",
        )


def sft_config(recipe: Recipe, run: Run, device: Device, *, evaluates: bool) -> SFTConfig:
    """The recipe in TRL's words. Rows are finished already, so TRL prepares, cuts and packs nothing."""
    train = recipe.train
    if "auto" in (train.micro_batch, train.checkpointing):
        raise InputError("The recipe still says auto.", "Resolve it first with `plan.resolve`.")
    micro = int(train.micro_batch)
    return SFTConfig(
        output_dir=str(run.checkpoints),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        remove_unused_columns=False,
        num_train_epochs=train.epochs,
        max_steps=train.steps or -1,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=train.batch_size // (micro * device.count),
        learning_rate=train.learning_rate,
        lr_scheduler_type=_SCHEDULES[train.schedule],
        warmup_steps=train.warmup,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=train.optimizer,
        seed=train.seed,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        **_checkpointing(int(train.checkpointing)),
        use_cpu=training_device() == "cpu",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device.kind == "cuda",
        logging_steps=train.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=list(train.report_to) or "none",
        run_name=run.name,
        eval_strategy="no" if not evaluates else "steps" if train.eval_every else "epoch",
        eval_steps=train.eval_every,
        prediction_loss_only=True,
        save_strategy="steps" if train.save_every else "epoch",
        save_steps=train.save_every or 500,
        save_total_limit=None,  # Record.on_save keeps the newest complete ones
    )


def _checkpointing(every: int) -> dict[str, Any]:
    """transformers 5.18 renamed gradient checkpointing to activation checkpointing; TRL's default is on."""
    names = {field.name for field in fields(SFTConfig)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    settings = {"use_reentrant": False, **({"every_n_layers": every} if every > 1 else {})}
    return {name: bool(every), **({f"{name}_kwargs": settings} if every else {})}


def _numbers(rows: range) -> Dataset:
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
        train = self._train
        return iter(
            epoch_order(
                self._lengths, train.batch_size, int(train.micro_batch), flat=self._flat, seed=train.seed,
                epoch=self.epoch,
            )
        )  # fmt: skip
