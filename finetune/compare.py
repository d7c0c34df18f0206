"""One model in all ways of training it: full, LoRA and QLoRA, by targets and rank, against the common cards.

Every row is a plan of its own, with the same batch, length and device settings as the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.device import Device, named_device
from finetune.errors import InputError
from finetune.facts import Facts
from finetune.memory import static_lines
from finetune.paths import Lengths
from finetune.plan import CARDS, Plan, changed, planned, resolve
from finetune.recipe import Full, LoRA, Method, QLoRA, Recipe

TARGETS = ("qv", "attention", "attention+mlp")


@dataclass(frozen=True)
class Row:
    """One way to train. `adapter_file` in bytes (fp32).

    `cards` are the common cards, in GB, that it fits on; `recomputing` those that it fits on when every layer is run
    again in the backward pass.
    """

    method: str
    targets: str
    rank: int | None
    plan: Plan
    static: int
    adapter_file: int
    cards: tuple[int, ...]
    recomputing: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "method": self.method,
            "targets": self.targets,
            "rank": self.rank,
            "trainable": self.plan.trainable,
            "share": self.plan.trainable / self.plan.parameters,
            "adapter_file": self.adapter_file,
            "static": self.static,
            "buckets": self.plan.buckets(),
            "total": self.plan.total,
            "micro_batch": self.plan.micro_batch,
            "checkpointing": self.plan.path.checkpointing,
            "fits": list(self.cards),
            "fits_recomputing": list(self.recomputing),
        }


def compare(
    recipe: Recipe, facts: Facts, device: Device, ranks: Sequence[int] = (), lengths: Lengths | None = None
) -> list[Row]:
    """Full fine-tuning, then LoRA and QLoRA for each target strategy and rank.

    The rows are planned with one row of the data a pass and no recomputing unless the recipe says otherwise, so that
    they can be held against each other. Strategies that the model has no layers for are left out.
    """
    rows = [_row(recipe, facts, device, Full(kind="full"), lengths)]
    rank = 16 if isinstance(recipe.method, Full) else recipe.method.rank
    for kind in (LoRA, QLoRA):
        for targets in TARGETS:
            for each in ranks or (rank,):
                method = _method(recipe, kind, targets, each)
                try:
                    rows.append(_row(recipe, facts, device, method, lengths))
                except InputError:
                    break
    return rows


def _method(recipe: Recipe, kind: type[LoRA] | type[QLoRA], targets: str, rank: int) -> Method:
    own = {} if isinstance(recipe.method, Full) else recipe.method.model_dump()
    common = {key: own[key] for key in ("dropout", "variant") if key in own}
    name = "lora" if kind is LoRA else "qlora"
    return kind(kind=name, targets=targets, rank=rank, alpha=2.0 * rank, **common)  # type: ignore[arg-type]


def _row(recipe: Recipe, facts: Facts, device: Device, method: Method, lengths: Lengths | None) -> Row:
    micro = recipe.train.micro_batch if isinstance(recipe.train.micro_batch, int) else 1
    train: dict[str, Any] = {"micro_batch": micro}
    if recipe.train.checkpointing == "auto":
        train["checkpointing"] = False
    asked = recipe.model_copy(update={"method": method, "train": recipe.train.model_copy(update=train)})
    if isinstance(method, Full) and not isinstance(recipe.method, Full):
        asked = asked.model_copy(update={"load": asked.load.model_copy(update={"dtype": "auto"})})
    answer, plan = resolve(asked, facts, device, lengths)
    again = planned(changed(answer, "train.checkpointing", True), facts, device, lengths)
    static = static_lines(method, facts, answer.load.dtype, answer.train.optimizer, device.kind)
    full = isinstance(method, Full)
    fitting = tuple(size for size in CARDS if _fits(plan, size))
    return Row(
        method.kind,
        "every weight" if isinstance(method, Full) else str(method.targets),
        None if isinstance(method, Full) else method.rank,
        plan,
        sum(line.bytes for line in static),
        0 if full else 4 * plan.trainable,
        fitting,
        tuple(size for size in CARDS if size not in fitting and _fits(again, size)),
    )


def _fits(plan: Plan, size: int) -> bool:
    return plan.device.kind == "cuda" and plan.total <= named_device(f"{size}GB").memory
