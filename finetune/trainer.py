"""Everything above -> one `SFTTrainer`. The only place where recipe names meet TRL's names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Imported by `train` only, when training starts.
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]  # noqa: TID253

from finetune.batches import Collator, EpochOrder, Epochs, numbered
from finetune.callbacks import Clock, FiniteLoss, Interrupt, Measure, Progress, Record
from finetune.data import Prepared
from finetune.device import Device
from finetune.errors import FinetuneError, InputError
from finetune.facts import Facts
from finetune.fast import last
from finetune.fast.attention import documents
from finetune.fast.compiled import CompileLayers, Span, layers_of
from finetune.fast.head import IGNORED, is_plain, labels_of, onepass_loss, output_head, supervised_loss
from finetune.fast.host import keep_freed_memory
from finetune.fast.products import by_torch, onednn
from finetune.heads import Logits, logits_of
from finetune.method import why_alone
from finetune.model import trained_in_fp32, training_device
from finetune.paths import lies_flat, path_of, why_not_held
from finetune.recipe import Recipe
from finetune.run import Run
from finetune.steps import Path as StepPath

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


class Trainer(SFTTrainer):
    """SFTTrainer that keeps trained parameters in fp32 and writes nothing beside the checkpoints."""

    model: Any

    def __init__(
        self, *args: Any, clock: Clock, progress: Progress, measure: Measure, order: EpochOrder,
        logits: Logits | None, path: StepPath, products: bool, compiled: bool, **kwargs: Any,
    ) -> None:  # fmt: skip
        """`logits`: of a head for `onepass_loss`, None for any other. `products`: by `fast.products` instead of
        torch's own. `compiled`: layers go through `torch.compile`.
        """
        super().__init__(*args, **kwargs)
        self.order = order
        self.logits, self.path, self.products, self.compiled = logits, path, products, compiled
        self.clock, self.progress, self.measure = clock, progress, measure
        self._ops = 0
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
                with self._as_asked():
                    self.train()
            else:
                state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
                counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
                self._total_train_tokens = self.tokens_before = int(counts[-1]) if counts else 0
                if state.global_step < state.max_steps:
                    with self._as_asked():
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

    @contextmanager
    def _as_asked(self) -> Iterator[None]:
        path = self.path
        with (
            documents(self.model, blocks=path.blocks, turned=path.turned, compiled=self.compiled)
            if path.attention == "documents"
            else nullcontext(),
            nullcontext() if self.products else by_torch(),
            _forgiving_compiler() if self.compiled else nullcontext(),
            _without_walks(self.model),
        ):
            yield

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
        labels = int((labels_of(inputs) != IGNORED).sum())
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
        if self.logits is None:
            loss = supervised_loss(model, inputs, num_items_in_batch)
        else:
            loss = onepass_loss(model, inputs, num_items_in_batch, logits=self.logits)
        if self.model.training:
            self._total_train_tokens += self._tokens(inputs)
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]
        # Labels are counted over all processes, and DistributedDataParallel averages the gradients of them.
        return loss * self.accelerator.num_processes if num_items_in_batch is not None else loss

    @property
    def tokens(self) -> float:
        """Tokens trained so far, over all processes."""
        return float(self._total_train_tokens)

    def _tokens(self, inputs: dict[str, Any]) -> int:
        """Tokens of the rows of this micro-batch over all processes, padding not counted."""
        import torch

        mask, count = inputs.get("attention_mask"), inputs.get("row_tokens")
        if count is None:
            count = mask.sum() if mask is not None else torch.tensor(inputs["input_ids"].numel())
        return int(self.accelerator.gather(count).sum())

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """transformers' count for its own log, without a walk over all modules for each micro-batch."""
        self._ops = self._ops or 6 * self.model.num_parameters(exclude_embeddings=True)
        return self._ops * int(inputs["input_ids"].numel())

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> EpochOrder:
        return self.order

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No README in every checkpoint."""


def _forgiving_compiler() -> AbstractContextManager[Any]:
    """What torch.compile cannot compile runs as it is, and torch warns."""
    from torch._dynamo import config

    patched: AbstractContextManager[Any] = config.patch(suppress_errors=True)
    return patched


@contextmanager
def _without_walks(model: Any) -> Iterator[None]:
    """transformers asks for training mode and for no gradients in every step, each time through all modules."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    walk = model.train
    walk()  # once: a peft model is in training mode from the beginning, the model inside of it is not

    def train(mode: bool = True) -> Any:
        return model if model.training == mode else walk(mode)

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in trained:
            parameter.grad = None

    model.train, model.zero_grad = train, zero_grad
    try:
        yield
    finally:
        del model.train, model.zero_grad


def build_trainer(
    recipe: Recipe,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Prepared,
    run: Run,
    device: Device,
    interrupt: Interrupt,
    facts: Facts,
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

    def places(first: int, last: int) -> list[str]:
        return [data.train.place(row) for step in range(first, last + 1) for row in order.rows_of(step)]

    path = path_of(recipe, facts, device)
    logits = logits_of(facts) if path.loss == "onepass" else None
    if logits is not None and not is_plain(output_head(model)):
        log.warning("The output head of %s is not a plain matrix: its loss is taken by autograd.", recipe.model)
        logits = None
    layers = layers_of(model) if recipe.fast.compile else []
    if recipe.fast.compile and not layers:
        log.warning(
            "The layers of %s have no name that is known and are not compiled. Leave fast.compile off.", recipe.model
        )
    log.info(
        "Loss: %s. Attention: %s. Adapters: %s. Norms and MLPs: %s. Products with frozen fp32 weights: %s. "
        "Frozen weights of the layers: %s. Last MLP: %s. Layers: %s.",
        "supervised" if path.loss == "onepass" and logits is None else path.loss,
        path.attention + (", backward in blocks" if path.blocks else ""),
        why_alone(recipe, facts) or "together where they share an input",
        "keep what they take in" if path.lean else "transformers' own",
        "oneDNN" if recipe.fast.products and device.kind == "cpu" and onednn() else "torch's own",
        _weights_in_words(recipe, facts, device),
        "supervised positions" if path.last and logits is not None else "all positions",
        "compiled after some steps" if layers else "not compiled",
    )
    if path.last and logits is not None:
        last.attach(model)
    if device.kind == "cpu" and recipe.fast.memory:
        keep_freed_memory()
    apart = path.attention == "documents"
    trainer = Trainer(
        logits=logits,
        path=path,
        compiled=bool(layers),
        products=recipe.fast.products,
        clock=clock,
        progress=progress,
        measure=measure,
        model=model,
        args=config,
        order=order,
        train_dataset=numbered(range(len(data.train))),
        eval_dataset=numbered(range(len(data.train), len(data.train) + len(data.eval))) if data.eval else None,
        data_collator=Collator(data, tokenizer, flat=flat, apart=recipe.fast if apart else None),
        processing_class=tokenizer,
        callbacks=[
            clock,
            measure,
            interrupt,
            FiniteLoss(run, places),
            Epochs(order),
            Record(run, recipe.train.keep, clock),
            progress,
        ],
    )
    trainer.remove_callback(PrinterCallback)
    if layers:
        trainer.add_callback(
            CompileLayers(layers, lambda: Span(clock.seconds, trainer.tokens), progress.say, run.event)
        )
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


def _weights_in_words(recipe: Recipe, facts: Facts, device: Device) -> str:
    """How the layers' frozen weights lie in memory, and why not as in their file where that was asked for."""
    if recipe.fast.weights is False:
        return "in the type of the model"
    why = why_not_held(recipe, facts, device)
    return f"in the type of the model ({why})" if why else "as in their file, dense for one product at a time"


def _checkpointing(every: int) -> dict[str, Any]:
    """transformers 5.18 renamed gradient checkpointing to activation checkpointing; TRL's default is on."""
    names = {field.name for field in fields(SFTConfig)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    settings = {"use_reentrant": False, **({"every_n_layers": every} if every > 1 else {})}
    return {name: bool(every), **({f"{name}_kwargs": settings} if every else {})}
