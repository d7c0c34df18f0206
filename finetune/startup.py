"""What a process is told before torch and its neighbours are imported, for the recipe that it will run."""

from __future__ import annotations

import os
import sys
from typing import Any

from finetune.recipe import QLoRA, Recipe

SPINS = "4000"
"""Rounds that a thread of torch's waits awake for the next operation. libgomp's own 300,000 are about a millisecond
in which the processor does nothing for the run; too few, and waking up costs wall time. A GOMP_SPINCOUNT of the
user's counts instead, also in `scripts/bench.py`, so `GOMP_SPINCOUNT=10000 python scripts/bench.py --arms finetune`
shows what another number does."""


def prepare_process(recipe: Recipe) -> None:
    """Let torch's threads sleep sooner, and keep bitsandbytes out of a run that needs none of it.

    transformers and peft import bitsandbytes where they find it, for over a second, whether it is used or not. A
    process that runs another recipe later must not call this: they remember that there was none.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    modules: dict[str, Any] = sys.modules
    if not needs_bitsandbytes(recipe):
        modules.setdefault("bitsandbytes", None)  # importlib finds no module of this name then


def needs_bitsandbytes(recipe: Recipe) -> bool:
    """4-bit weights, or an optimizer that is not torch's own; `auto` is one of torch's without 4-bit weights."""
    return isinstance(recipe.method, QLoRA) or not recipe.train.optimizer.startswith(("auto", "adamw_torch"))
