"""Recipe + facts + device -> a resolved recipe that fits, with a reason for each choice, and what it costs.

`resolve` answers every "auto" once; the run folder keeps the answers, so a rerun is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from finetune.device import Device, named_device
from finetune.errors import DoesNotFit, InputError
from finetune.facts import Facts, read_facts
from finetune.footprint import LIBRARIES, disk_lines, host_lines
from finetune.memory import BUCKETS, CONTEXT, Account, Line, account
from finetune.method import saved_tensors, target_modules, trainable_parameters
from finetune.paths import KEEPS_ROWS_APART, Lengths, batch_of, in_words, packing_of, path_of, why_not_held
from finetune.recipe import Full, QLoRA, Recipe, load_recipe
from finetune.speed import Speed, speed_of
from finetune.steps import Batch, Path

_NO_SDPA = ("gemma2",)  # softcapped scores: transformers offers no sdpa for them
_ROWS_CPU, _ROWS_CUDA = 8, 32  # more rows per pass gain no speed
_ENOUGH = 2048  # tokens per pass from which a GPU is busy
_MOSTLY_WEIGHTS = 2 / 3  # of the peak: above it some weights are worth being made dense for each product
_TOKENS_HELD = (
    800  # tokens of a pass from which on all blocks are held; of shorter ones a part, for up to 2 % of the time
)
_SPARE = 0.05  # of what comes and goes: free pieces between the allocator's blocks
_CPU_ROOM = 0.9  # of a machine's memory; the rest is the system's
CARDS = (8, 12, 16, 24, 40, 48, 80, 141)
"""Common cards in GB."""


@dataclass(frozen=True)
class Choice:
    """One answered "auto": the field, the value, and why."""

    field: str
    value: Any
    because: str


@dataclass(frozen=True)
class Plan:
    """Predicted memory of one training step on one device, in bytes.

    `tokens` are those of the whole training, over all devices; None while neither the rows nor the steps are known.
    """

    model: str
    method: str
    device: Device
    parameters: int
    trainable: int
    micro_batch: int
    batch: Batch
    path: Path
    account: Account
    outside: tuple[Line, ...]
    choices: tuple[Choice, ...]
    speed: Speed | None
    host: tuple[Line, ...] = ()
    disk: tuple[Line, ...] = ()
    tokens: int | None = None
    lengths: Lengths | None = None

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every line, those outside of torch's allocator last."""
        return (*self.account.lines, *self.outside)

    @property
    def total(self) -> int:
        """What the device must hold at the peak, with what lies outside of torch's allocator."""
        return self.account.peak + sum(line.bytes for line in self.outside)

    @property
    def hours(self) -> float | None:
        """Estimated hours of training steps on all devices together, without evaluations and saves."""
        if self.tokens is None or self.speed is None:
            return None
        return self.tokens / (self.speed.expected * self.device.count) / 3600

    @property
    def room(self) -> int:
        """Bytes of the device that training may use."""
        return int(self.device.memory * (_CPU_ROOM if self.device.kind == "cpu" else 1))

    @property
    def fits(self) -> bool:
        """Whether the total fits into the room."""
        return self.total <= self.room

    def buckets(self) -> dict[str, int]:
        """Bytes per bucket that are alive at the peak, in order; together they are the total."""
        return {b: sum(line.alive for line in self.lines if line.bucket == b) for b in BUCKETS}

    def document(self) -> dict[str, Any]:
        """What plan.json holds and `--json` prints."""
        return {
            "model": self.model,
            "method": self.method,
            "device": asdict(self.device),
            "parameters": self.parameters,
            "trainable": self.trainable,
            "micro_batch": self.micro_batch,
            "batch": asdict(self.batch),
            "path": asdict(self.path),
            "models": in_words(self.path, self.batch),
            "total": self.total,
            "allocated": self.account.peak,
            "fits": self.fits,
            "estimated": self.account.estimated,
            "during": self.account.during,
            "buckets": self.buckets(),
            "phases": self.account.phases,
            "lines": [{**asdict(line), "at_peak": line.alive} for line in self.lines],
            "choices": [asdict(choice) for choice in self.choices],
            "host": [asdict(line) for line in self.host],
            "disk": [asdict(line) for line in self.disk],
            "speed": None if self.speed is None else _speed_document(self.speed),
            "tokens": self.tokens,
            "hours": self.hours,
            "lengths": None if self.lengths is None else _lengths_document(self.lengths),
        }


def _speed_document(speed: Speed) -> dict[str, Any]:
    return {
        "flop_per_token": speed.flop_per_token,
        "tokens_per_second_at_peak": speed.floor,
        "utilisation": speed.utilisation,
        "tokens_per_second": speed.expected,
    }


def _lengths_document(lengths: Lengths) -> dict[str, Any]:
    return {
        "source": lengths.source,
        "rows": lengths.of,
        "rows_read": len(lengths.pairs),
        "longest": lengths.longest,
        "mean": lengths.mean,
        "trained_share": lengths.trained_share,
        "histogram": lengths.histogram(),
    }


def plan(recipe: Recipe | str, device: Device | str = "auto", lengths: Lengths | None = None) -> Plan:
    """Predict the training memory of a recipe on a device, before a weight is downloaded.

    `lengths` are those of the rows to be trained; without them every row is taken to be `data.max_length` long.
    """
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    device = named_device(device) if isinstance(device, str) else device
    return resolve(recipe, read_facts(recipe.model, recipe.load.revision), device, lengths)[1]


def require_fit(planned: Plan) -> None:
    """Raise `DoesNotFit` when the plan is larger than its device."""
    if planned.fits:
        return
    largest = max(planned.buckets().items(), key=lambda item: item[1])
    raise DoesNotFit(
        f"{planned.method} of {planned.model} needs {_about(planned)}{planned.total / 1e9:.1f} GB and "
        f"{planned.device.name} has {planned.room / 1e9:.1f} GB for it; the largest part is {largest[0]} with "
        f"{largest[1] / 1e9:.1f} GB.",
        "`finetune plan` lists what would make it fit, cheapest first, and `finetune plan --fit FILE` writes it.",
    )


def _about(planned: Plan) -> str:
    return "about " if planned.account.estimated else ""


def resolve(recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None = None) -> tuple[Recipe, Plan]:
    """Answer every "auto" of a recipe for this model and device, and plan the memory of the result.

    Raises `InputError` for targets the model does not have and batch sizes that do not divide.
    """
    if not isinstance(recipe.method, Full):
        target_modules(recipe.method, facts)  # both refuse by name what is not there
        saved_tensors(recipe.method, facts)
    choices: list[Choice] = []

    def settle(part: str, field: str, value: Any, because: str) -> None:
        nonlocal recipe
        if getattr(getattr(recipe, part), field) == "auto":
            choices.append(Choice(f"{part}.{field}", value, because))
            recipe = changed(recipe, f"{part}.{field}", value)

    for part, field, value, because in _answers(recipe, facts, device):
        settle(part, field, value, because)
    if why_not_held(recipe, facts, device) is None:
        if recipe.fast.weights == "auto":
            settle("fast", "weights", *_weights(recipe, facts, device, lengths))
    elif recipe.fast.weights == "auto":
        recipe = changed(recipe, "fast.weights", False)
    if "auto" in (recipe.train.micro_batch, recipe.train.checkpointing):
        micro, checkpointing, because = _batch(recipe, facts, device, lengths)
        settle("train", "micro_batch", micro, because)
        settle("train", "checkpointing", checkpointing, _why_checkpointing(checkpointing))
    _check(recipe, facts, device)
    return recipe, planned(recipe, facts, device, lengths, tuple(choices))


def changed(recipe: Recipe, field: str, value: Any) -> Recipe:
    """The recipe with one field, `part.name`, set to another value."""
    part, _, name = field.partition(".")
    return recipe.model_copy(update={part: getattr(recipe, part).model_copy(update={name: value})})


def planned(
    recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None = None, choices: tuple[Choice, ...] = ()
) -> Plan:
    """The plan of a recipe in which no "auto" is left."""
    batch, path = batch_of(recipe, facts, device, lengths), path_of(recipe, facts, device)
    held = account(recipe.method, facts, batch, path)
    share = lengths.trained_share if lengths else batch.supervised / batch.tokens
    length = int(lengths.mean) if lengths else batch.length
    return Plan(
        recipe.model,
        recipe.method.kind,
        device,
        facts.parameters,
        trainable_parameters(recipe.method, facts),
        int(recipe.train.micro_batch),
        batch,
        path,
        held,
        tuple(_outside(held, device)),
        choices,
        speed_of(recipe.method, facts, path, device, length, share),
        tuple(host_lines(recipe, facts, device, held, lengths)),
        tuple(disk_lines(recipe, facts, held)),
        _all_tokens(recipe, batch, lengths),
        lengths,
    )


def _all_tokens(recipe: Recipe, batch: Batch, lengths: Lengths | None) -> int | None:
    """Tokens of the whole training."""
    if recipe.train.steps is not None:
        mean = lengths.mean if lengths else batch.tokens / int(recipe.train.micro_batch)
        return int(recipe.train.steps * recipe.train.batch_size * mean)
    return int(recipe.train.epochs * lengths.of * lengths.mean) if lengths else None


def _outside(held: Account, device: Device) -> Iterator[Line]:
    """What the device holds beside torch's tensors."""
    if device.kind == "cpu":
        yield Line("outside", "Python and libraries", LIBRARIES["cpu"], "as it is in practice", exact=False)
        return
    if device.count > 1:
        copies = sum(line.bytes for line in held.lines if line.bucket == "gradients")
        yield Line("outside", "buckets of DistributedDataParallel", copies, "a copy of the gradients")
    yield Line("outside", "CUDA context", CONTEXT, "as it is in practice", exact=False)
    yield spare_line(held.peak - held.phases["load"])


def spare_line(moving: int) -> Line:
    """Free pieces between the allocator's blocks, as a share of the bytes that come and go."""
    return Line(
        "outside", "spare pieces of the allocator", int(_SPARE * moving), f"{_SPARE:.0%} of what comes and goes",
        exact=False,
    )  # fmt: skip


def _check(recipe: Recipe, facts: Facts, device: Device) -> None:
    """Refuse what cannot run, or would mix rows, whatever the memory."""
    micro = int(recipe.train.micro_batch)
    if recipe.train.batch_size % (micro * device.count):
        below = recipe.train.batch_size // (micro * device.count) * micro * device.count
        fitting = " or ".join(str(n) for n in (below, below + micro * device.count) if n)
        raise InputError(
            f"train.batch_size {recipe.train.batch_size} is no multiple of {micro} rows x {device.count} devices.",
            f"Set train.batch_size to {fitting}, or give another train.micro_batch.",
        )
    if recipe.data.packing and facts.model_type not in KEEPS_ROWS_APART:
        raise InputError(
            f"data.packing is {str(recipe.data.packing).lower()}, but models of type {facts.model_type} are not "
            "known to keep rows apart that lie end to end.",
            "Set data.packing: auto or false.",
        )
    if device.kind == "cpu" and (recipe.train.precision == "fp16" or recipe.load.attention == "flash_attention_2"):
        raise InputError(
            f"train.precision {recipe.train.precision} with load.attention {recipe.load.attention} needs a GPU.",
            "Set both to auto.",
        )


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
    if recipe.train.precision == "fp32":
        half, why = "float32", "train.precision is fp32"
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
    yield "data", "packing", *packing_of(recipe, facts.model_type, device)
    if device.kind == "cpu":
        yield "train", "optimizer", "adamw_torch_fused", "paging needs a GPU"
    elif isinstance(recipe.method, QLoRA):
        yield "train", "optimizer", "paged_adamw_8bit", "smallest state, and peaks go to host memory"
    else:
        yield "train", "optimizer", "adamw_torch_fused", "the fastest AdamW"


# -------------------------------------------------------------------------------------------- rows and recomputing


def _weights(recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None) -> tuple[bool | int, str]:
    """Which layers' weights lie as in their file. 16-bit ones cost next to no time to make dense, all blocks 2 to 8 %
    (`scripts/bench_weights.py`): a few are held where weights are most of the peak, and all where more fits then.
    """
    if not facts.blocks:
        return True, "16-bit weights are half as large; costs up to 3 % more time"
    plain, held = (
        resolve(changed(recipe, "fast.weights", value), facts, device, lengths)[1] for value in (False, True)
    )
    if held.micro_batch > plain.micro_batch or held.path.checkpointing != plain.path.checkpointing or not plain.fits:
        return True, "more fits that way"
    share = 4 * facts.parameters / plain.account.peak
    every = -(-_TOKENS_HELD // plain.batch.tokens)
    if share <= _MOSTLY_WEIGHTS or every > facts.layers:
        return False, f"weights are {share:.0%} of the peak, and making them dense takes time"
    return every if every > 1 else True, f"weights are {share:.0%} of the peak; costs up to 2 % more time"


def _batch(recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None) -> tuple[int, bool | int, str]:
    """Most rows per pass that fit, with the least recomputing; fewer rows are cheaper than recomputing, down to a
    pass that still keeps the device busy."""
    train = recipe.train
    rows = (
        [train.micro_batch]
        if isinstance(train.micro_batch, int)
        else _divisors(train.batch_size // device.count, device)
    )
    modes: list[bool | int] = [False, 4, 3, 2, True] if train.checkpointing == "auto" else [train.checkpointing]
    length = min(lengths.longest if lengths else recipe.data.max_length, recipe.data.max_length)
    busy = [n for n in rows if n * length >= _ENOUGH] or rows[:1]

    def fits(micro: int, mode: bool | int) -> bool:
        trial = changed(changed(recipe, "train.micro_batch", micro), "train.checkpointing", mode)
        return planned(trial, facts, device, lengths).fits

    because = f"the most rows of {length:,} tokens that fit and divide the batch"
    for mode in modes:
        if (micro := _most(busy, mode, fits)) is not None:
            return micro, mode, because
    if (micro := _most(rows, modes[-1], fits)) is not None:
        return micro, modes[-1], because
    return rows[-1], modes[-1], "the fewest rows; even they do not fit"


def _most(rows: list[int], mode: bool | int, fits: Any) -> int | None:
    """The largest of falling `rows` that fits; None when not even the smallest does."""
    if not fits(rows[-1], mode):
        return None
    return next(micro for micro in rows if micro == rows[-1] or fits(micro, mode))


def _divisors(batch: int, device: Device) -> list[int]:
    most = _ROWS_CPU if device.kind == "cpu" else _ROWS_CUDA
    return [n for n in range(min(most, batch), 0, -1) if batch % n == 0] or [1]


def _why_checkpointing(mode: bool | int) -> str:
    if mode is False:
        return "the step fits without it"
    if mode is True:
        return "without it the step does not fit; costs about 30 % more time"
    return f"every {mode}. layer is enough to make it fit; costs about {30 / mode:.0f} % more time"


__all__ = ["CARDS", "Choice", "Plan", "changed", "plan", "planned", "require_fit", "resolve"]
