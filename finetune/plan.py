"""Recipe + facts + device -> a resolved recipe that fits, with a reason for each choice.

`resolve` answers every "auto" once; the run folder keeps the answers, so a rerun is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from finetune.device import Device, named_device
from finetune.errors import DoesNotFit, InputError
from finetune.facts import Facts, read_facts
from finetune.memory import BUCKETS, Line, activation_lines, static_lines
from finetune.method import target_modules, trainable_parameters
from finetune.recipe import Full, QLoRA, Recipe, load_recipe

_ROOM = 0.9  # share of the device's memory that a plan may use; the rest is context and fragments
_NO_SDPA = ("gemma2",)  # softcapped scores: transformers offers no sdpa for them
_ROWS_CPU, _ROWS_CUDA = 8, 32  # more rows per pass gain no speed


@dataclass(frozen=True)
class Choice:
    """One answered "auto": the field, the value, and why."""

    field: str
    value: Any
    because: str


@dataclass(frozen=True)
class Plan:
    """Predicted memory of one training step on one device, in bytes."""

    model: str
    method: str
    device: Device
    parameters: int
    trainable: int
    lines: tuple[Line, ...]
    choices: tuple[Choice, ...]

    @property
    def total(self) -> int:
        """All lines together."""
        return sum(line.bytes for line in self.lines)

    @property
    def fits(self) -> bool:
        """Whether the total leaves a tenth of the device free."""
        return self.total <= _ROOM * self.device.memory

    def buckets(self) -> dict[str, int]:
        """Bytes per bucket, in order."""
        return {bucket: sum(line.bytes for line in self.lines if line.bucket == bucket) for bucket in BUCKETS}

    def document(self) -> dict[str, Any]:
        """What plan.json holds and `--json` prints."""
        return {
            "model": self.model,
            "method": self.method,
            "device": asdict(self.device),
            "parameters": self.parameters,
            "trainable": self.trainable,
            "total": self.total,
            "fits": self.fits,
            "buckets": self.buckets(),
            "lines": [asdict(line) for line in self.lines],
            "choices": [asdict(choice) for choice in self.choices],
        }


def plan(recipe: Recipe | str, device: Device | str = "auto") -> Plan:
    """Predict the training memory of a recipe on a device, before a weight is downloaded."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    device = named_device(device) if isinstance(device, str) else device
    return resolve(recipe, read_facts(recipe.model, recipe.load.revision), device)[1]


def require_fit(planned: Plan) -> None:
    """Raise `DoesNotFit` when the plan is larger than its device."""
    if planned.fits:
        return
    largest = max(planned.buckets().items(), key=lambda item: item[1])
    raise DoesNotFit(
        f"{planned.method} of {planned.model} needs about {planned.total / 1e9:.1f} GB and {planned.device.name} has "
        f"{planned.device.memory / 1e9:.1f} GB; the largest part is {largest[0]} with {largest[1] / 1e9:.1f} GB.",
        _remedy(planned, largest[0]),
    )


def _remedy(planned: Plan, largest: str) -> str:
    if largest in ("activations", "loss"):
        return "Lower train.micro_batch or data.max_length, or set train.checkpointing: true."
    if planned.method == "full":
        return "Set method.kind: lora, which needs no gradients and optimizer state of the base."
    return "Set method.kind: qlora, or take a smaller model." if planned.method == "lora" else "Take a smaller model."


def resolve(recipe: Recipe, facts: Facts, device: Device) -> tuple[Recipe, Plan]:
    """Answer every "auto" of a recipe for this model and device, and plan the memory of the result.

    Raises `InputError` for targets the model does not have and batch sizes that do not divide.
    """
    if not isinstance(recipe.method, Full):
        target_modules(recipe.method, facts)  # refuses by name what is not there
    choices: list[Choice] = []

    def settle(part: str, field: str, value: Any, because: str) -> None:
        nonlocal recipe
        if getattr(getattr(recipe, part), field) == "auto":
            choices.append(Choice(f"{part}.{field}", value, because))
            recipe = recipe.model_copy(update={part: getattr(recipe, part).model_copy(update={field: value})})

    for part, field, value, because in _answers(recipe, facts, device):
        settle(part, field, value, because)
    micro, checkpointing, because = _batch(recipe, facts, device)
    settle("train", "micro_batch", micro, because)
    settle("train", "checkpointing", checkpointing, _why_checkpointing(checkpointing))
    micro = int(recipe.train.micro_batch)
    if recipe.train.batch_size % (micro * device.count):
        below = recipe.train.batch_size // (micro * device.count) * micro * device.count
        fitting = " or ".join(str(n) for n in (below, below + micro * device.count) if n)
        raise InputError(
            f"train.batch_size {recipe.train.batch_size} is no multiple of {micro} rows x {device.count} devices.",
            f"Set train.batch_size to {fitting}, or give another train.micro_batch.",
        )
    if device.kind == "cpu" and (recipe.train.precision == "fp16" or recipe.load.attention == "flash_attention_2"):
        raise InputError(
            f"train.precision {recipe.train.precision} with load.attention {recipe.load.attention} needs a GPU.",
            "Set both to auto.",
        )
    planned = Plan(
        recipe.model,
        recipe.method.kind,
        device,
        facts.parameters,
        trainable_parameters(recipe.method, facts),
        (*_static(recipe, facts), *_active(recipe, facts)),
        tuple(choices),
    )
    return recipe, planned


def _answers(recipe: Recipe, facts: Facts, device: Device) -> Iterator[tuple[str, str, Any, str]]:
    """(part, field, value, because) for every "auto" that does not depend on memory."""
    full = isinstance(recipe.method, Full)
    if device.kind == "cpu":
        half, precision = ("bfloat16", "bf16") if device.bf16 else ("float32", "fp32")
        why = (
            "this CPU has bf16 instructions"
            if device.bf16
            else "this CPU has no bf16 instructions; fp32 is about 3x faster"
        )
    else:
        half, precision = ("bfloat16", "bf16") if device.bf16 else ("float16", "fp16")
        why = (
            "a card with bf16 units (compute capability 8.0 and up)"
            if device.bf16
            else f"{device.name} has no bf16 units"
        )
    yield "train", "precision", precision, why
    if full and half != "float32":
        yield "load", "dtype", "float32", "trained weights are fp32; products run in " + precision
    else:
        yield "load", "dtype", half, why
    if isinstance(recipe.method, QLoRA):
        yield "method", "compute_dtype", half, why
    eager = facts.model_type in _NO_SDPA
    yield (
        "load",
        "attention",
        "eager" if eager else "sdpa",
        f"{facts.model_type} caps its scores, which sdpa cannot"
        if eager
        else "the fastest that needs no extra package",
    )
    if device.kind == "cpu":
        yield "train", "optimizer", "adamw_torch_fused", "paging needs a GPU"
    elif isinstance(recipe.method, QLoRA):
        yield "train", "optimizer", "paged_adamw_8bit", "smallest state, and peaks go to host memory"
    else:
        yield "train", "optimizer", "adamw_torch_fused", "the fastest AdamW"


def _batch(recipe: Recipe, facts: Facts, device: Device) -> tuple[int, bool, str]:
    """Most rows per pass that fit, without recomputing if that fits."""
    train = recipe.train
    rows = (
        [train.micro_batch]
        if isinstance(train.micro_batch, int)
        else _divisors(train.batch_size // device.count, device)
    )
    modes = [train.checkpointing] if isinstance(train.checkpointing, bool) else [False, True]
    fixed = sum(line.bytes for line in _static(recipe, facts))
    for checkpointing in modes:
        for micro in rows:
            trial = _with(recipe, micro, checkpointing)
            if fixed + sum(line.bytes for line in _active(trial, facts)) <= _ROOM * device.memory:
                return (
                    micro,
                    checkpointing,
                    f"the most rows of {recipe.data.max_length:,} tokens that fit and divide the batch",
                )
    return rows[-1], modes[-1], "the fewest rows; even they do not fit"


def _divisors(batch: int, device: Device) -> list[int]:
    most = _ROWS_CPU if device.kind == "cpu" else _ROWS_CUDA
    return [n for n in range(min(most, batch), 0, -1) if batch % n == 0] or [1]


def _why_checkpointing(on: bool) -> str:
    return "without it the step does not fit; costs about 30 % more time" if on else "the step fits without it"


def _with(recipe: Recipe, micro: int, checkpointing: bool) -> Recipe:
    train = recipe.train.model_copy(update={"micro_batch": micro, "checkpointing": checkpointing})
    return recipe.model_copy(update={"train": train})


def _static(recipe: Recipe, facts: Facts) -> list[Line]:
    return static_lines(recipe.method, facts, recipe.load.dtype, recipe.train.optimizer)


def _active(recipe: Recipe, facts: Facts) -> list[Line]:
    train = recipe.train
    return activation_lines(
        recipe.method,
        facts,
        dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[train.precision],
        rows=int(train.micro_batch),
        length=min(recipe.data.max_length, facts.max_position or recipe.data.max_length),
        checkpointing=bool(train.checkpointing),
        eager=recipe.load.attention == "eager",
    )


__all__ = ["Choice", "Plan", "plan", "require_fit", "resolve"]
