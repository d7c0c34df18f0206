"""When a plan does not fit: the changes that would make it fit, the cheapest in speed and quality first.

micro_batch      fewer rows a pass, more passes a step: the same result
weights          frozen ones as they lie in their file, on a CPU: the same result, up to 8 % more time
attention        a kernel that never holds the scores: the same result, needs a package
optimizer        moments in 8 bits, paged: nearly the same result
checkpointing    every 4., 2., each layer again in the backward pass: the same result, 8 to 30 % more time
method           full -> LoRA -> QLoRA: fewer trained weights, then 4-bit frozen ones
targets, rank    a smaller adapter
max_length       shorter rows: the data must allow it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.device import Device
from finetune.facts import Facts
from finetune.paths import Lengths, why_not_held
from finetune.plan import Plan, changed, planned
from finetune.recipe import Full, LoRA, Method, QLoRA, Recipe

_SHORTEST = 256
_LENGTH_STEP = 64
_HALF = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Change:
    """A field set to another value, what it costs, and the total it gives: alone, and with all before it."""

    field: str
    value: Any
    cost: str
    alone: int
    together: int
    fits: bool


@dataclass(frozen=True)
class Fit:
    """What it takes to fit. `changes` are tried one after the other; `recipe` has those that are needed."""

    changes: tuple[Change, ...]
    needed: tuple[str, ...]
    recipe: Recipe
    plan: Plan


def fit(recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None = None) -> Fit:
    """The cheapest way to make a resolved recipe fit; `plan.fits` of the answer says whether there is one."""
    tried: list[Change] = []
    steps: list[tuple[str, Any]] = []
    now = recipe
    while True:
        step = next(_steps(now, facts, device), None)
        if step is None:
            break
        field, value, cost = step
        now = _set(now, field, value)
        steps = [s for s in steps if s[0] != field] + [(field, value)]
        together = planned(now, facts, device, lengths)
        alone = planned(_set(recipe, field, value), facts, device, lengths)
        tried.append(Change(field, _shown(value), cost, alone.total, together.total, together.fits))
        if together.fits:
            break
    result = planned(now, facts, device, lengths)
    if result.fits:
        now, steps = _without_needless(recipe, steps, facts, device, lengths)
        result = planned(now, facts, device, lengths)
    return Fit(tuple(tried), tuple(field for field, _ in steps), now, result)


def _without_needless(
    recipe: Recipe, steps: list[tuple[str, Any]], facts: Facts, device: Device, lengths: Lengths | None
) -> tuple[Recipe, list[tuple[str, Any]]]:
    """Take back every change that the others make needless, the dearest first."""
    for step in reversed(list(steps)):
        fewer = [other for other in steps if other is not step]
        if planned(_all(recipe, fewer), facts, device, lengths).fits:
            steps = fewer
    return _all(recipe, steps), steps


def _all(recipe: Recipe, steps: list[tuple[str, Any]]) -> Recipe:
    for field, value in steps:
        recipe = _set(recipe, field, value)
    return recipe


def _set(recipe: Recipe, field: str, value: Any) -> Recipe:
    if field != "method":
        return changed(recipe, field, value)
    half = _HALF[recipe.train.precision]
    if isinstance(value, QLoRA):
        value = value.model_copy(update={"compute_dtype": half})
    if isinstance(recipe.method, Full):  # its weights were fp32 because they were trained
        recipe = changed(recipe, "load.dtype", half)
    return recipe.model_copy(update={"method": value})


def _shown(value: Any) -> Any:
    return value.kind if isinstance(value, (Full, LoRA, QLoRA)) else value


def _steps(recipe: Recipe, facts: Facts, device: Device) -> Iterator[tuple[str, Any, str]]:
    """(field, value, what it costs), from the cheapest on; each is tried after those before it."""
    train, method = recipe.train, recipe.method
    cuda = device.kind == "cuda"
    rows = int(train.micro_batch)
    if rows > 1:
        below = next(n for n in range(rows // 2, 0, -1) if train.batch_size % (n * device.count) == 0)
        yield "train.micro_batch", below, "same result, a little slower"
    if recipe.fast.weights is not True and why_not_held(recipe, facts, device) is None:
        yield "fast.weights", True, "same result, up to 8 % more time"
    if cuda and recipe.load.attention == "eager":
        yield "load.attention", "flash_attention_2", "same result, needs the flash-attn package"
    if cuda and not train.optimizer.endswith("8bit"):
        yield "train.optimizer", "paged_adamw_8bit", "nearly the same result"
    now = int(train.checkpointing)
    for every, cost in ((4, "8 %"), (2, "15 %"), (1, "30 %")):
        if now == 0 or now > every:
            value = True if every == 1 else every
            yield "train.checkpointing", value, f"same result, about {cost} more time"
    if isinstance(method, Full):
        yield "method", _as(LoRA, method), "trains an adapter instead of every weight"
    elif isinstance(method, LoRA) and cuda:
        yield "method", _as(QLoRA, method), "frozen weights in 4 bits: slightly worse, about 25 % more time"
    if not isinstance(method, Full):
        smaller = {"attention+mlp": "attention", "attention": "qv"}.get(str(method.targets))
        if smaller:
            yield "method.targets", smaller, "a smaller adapter learns less"
        if method.rank > 8:
            yield "method.rank", max(8, method.rank // 2), "a smaller adapter learns less"
    if recipe.data.max_length > _SHORTEST:
        shorter = max(recipe.data.max_length // 2, _SHORTEST)
        yield "data.max_length", shorter, "longer rows have to be dropped, cut or split"


def _as(kind: type[LoRA] | type[QLoRA], method: Method) -> LoRA | QLoRA:
    """The method as another kind, with what both have in common."""
    name = "lora" if kind is LoRA else "qlora"
    common = {} if isinstance(method, Full) else {k: v for k, v in method.model_dump().items() if k != "kind"}
    return kind(kind=name, **common)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- how much would still fit


def most_rows(recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None = None) -> int:
    """The largest micro-batch of the recipe's rows that fits; 0 when not even one row does."""

    def total(rows: int) -> int:
        return planned(changed(recipe, "train.micro_batch", rows), facts, device, lengths).total

    one, two = total(1), total(2)
    room = planned(recipe, facts, device, lengths).room
    if one > room:
        return 0
    low, high = 1, 2 + (room - one) // max(two - one, 1)  # about evenly, as long as rows are equally long
    while total(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= room else (low, middle)
    return low


def longest_row(recipe: Recipe, facts: Facts, device: Device) -> int:
    """The longest single row in tokens that fits, in steps of 64; 0 when not even the shortest does."""
    top = facts.max_position or 131_072

    def fits(length: int) -> bool:
        trial = changed(changed(recipe, "data.max_length", length), "train.micro_batch", 1)
        return planned(trial, facts, device).fits

    low, high = 0, top // _LENGTH_STEP
    if fits(high * _LENGTH_STEP):
        return high * _LENGTH_STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _LENGTH_STEP) else (low, middle)
    return low * _LENGTH_STEP
