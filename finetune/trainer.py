"""Everything above -> one `SFTTrainer`. The only place where recipe names meet TRL's names."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Imported by `train` only, when training starts.
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]  # noqa: TID253

from finetune.callbacks import Clock, FiniteLoss, Interrupt, Progress, Record
from finetune.data import Prepared
from finetune.device import Device
from finetune.errors import FinetuneError, InputError
from finetune.fast.head import supervised_loss
from finetune.model import trained_in_fp32, training_device
from finetune.recipe import Recipe
from finetune.run import Run

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
# Families whose masks follow position_ids in eager and sdpa attention; each is tested against separate rows.
_KEEPS_ROWS_APART = ("llama", "gemma", "gemma2", "gemma3_text", "mistral", "qwen2", "qwen3", "phi3")


class Trainer(SFTTrainer):
    """SFTTrainer that keeps trained parameters in fp32 and writes nothing beside the checkpoints."""

    model: Any

    def __init__(self, *args: Any, clock: Clock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = clock
        trained_in_fp32(self.model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """On a CPU, the loss on supervised rows; TRL's own head would score every position there."""
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

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No README in every checkpoint."""


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

    clock = Clock()
    trainer = Trainer(
        clock=clock,
        model=model,
        args=sft_config(
            recipe, run, device, evaluates=data.eval is not None, flat=lays_rows_flat(model, recipe, device)
        ),
        train_dataset=_dataset(data.train),
        eval_dataset=_dataset(data.eval) if data.eval is not None else None,
        processing_class=tokenizer,
        callbacks=[clock, Record(run, recipe.train.keep, clock), FiniteLoss(run), interrupt, Progress(clock)],
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


def lays_rows_flat(model: Any, recipe: Recipe, device: Device) -> bool:
    """Whether the rows of a micro-batch are laid end to end instead of padded to the longest.

    The model must then keep them apart by their positions. On a CPU the mask this takes costs less than padding.
    """
    rows = int(recipe.train.micro_batch)
    return device.kind == "cpu" and rows > 1 and model.config.model_type in _KEEPS_ROWS_APART


def sft_config(recipe: Recipe, run: Run, device: Device, *, evaluates: bool, flat: bool) -> SFTConfig:
    """The recipe in TRL's words. Rows are finished already, so TRL prepares, cuts and packs nothing."""
    train = recipe.train
    if not isinstance(train.micro_batch, int) or not isinstance(train.checkpointing, bool):
        raise InputError("The recipe still says auto.", "Resolve it first with `plan.resolve`.")
    return SFTConfig(
        output_dir=str(run.checkpoints),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        padding_free=flat,
        num_train_epochs=train.epochs,
        max_steps=train.steps or -1,
        per_device_train_batch_size=train.micro_batch,
        per_device_eval_batch_size=train.micro_batch,
        gradient_accumulation_steps=train.batch_size // (train.micro_batch * device.count),
        learning_rate=train.learning_rate,
        lr_scheduler_type=_SCHEDULES[train.schedule],
        warmup_steps=train.warmup,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=train.optimizer,
        seed=train.seed,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        **_checkpointing(train.checkpointing),
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


def _checkpointing(on: bool) -> dict[str, Any]:
    """transformers 5.18 renamed gradient checkpointing to activation checkpointing; TRL's default is on."""
    names = {field.name for field in fields(SFTConfig)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: on, **({f"{name}_kwargs": {"use_reentrant": False}} if on else {})}


def _dataset(rows: Any) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": rows.input_ids, "labels": rows.labels})
