"""Two real optimizer steps of a recipe, to hold the plan against what they take. Nothing is trained or kept.

The rows are made of random tokens in the shape of the plan's largest micro-batch; model, adapter, loss, optimizer and
trainer are the run's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.callbacks import Interrupt
from finetune.chat import Encoded
from finetune.data import Prepared
from finetune.device import Device
from finetune.facts import Facts
from finetune.fast.head import IGNORED
from finetune.measure import Measured, held_against
from finetune.plan import Plan, changed
from finetune.recipe import Recipe
from finetune.run import Run
from finetune.store import Rows
from finetune.trainer import build_trainer

STEPS = 2


def verify(
    recipe: Recipe, facts: Facts, plan: Plan, device: Device, tokenizer: Any, load: Callable[[], Any]
) -> Measured:
    """Train two steps of a resolved recipe on rows of the plan's shape and measure the second.

    `load` gives the model, ready to train. One process only.
    """
    for field, value in (("steps", STEPS), ("eval_every", None), ("report_to", [])):
        recipe = changed(recipe, f"train.{field}", value)
    with tempfile.TemporaryDirectory(prefix="finetune-verify-") as folder:
        run = Run(Path(folder))
        data = Prepared(_rows(plan, recipe.train.batch_size, facts.vocab_size), None, {}, [])
        trainer = build_trainer(recipe, load(), tokenizer, data, run, device, Interrupt(), facts)
        trainer.args.save_strategy = "no"  # with any other, transformers saves at the last step
        trainer.fit(None)
    measure = trainer.measure
    assert measure.peak is not None
    assert measure.largest is not None
    return held_against(measure.peak, measure.largest, plan.path, recipe.method, facts)


def _rows(plan: Plan, batch_size: int, vocabulary: int) -> Rows:
    """Enough rows for the steps: random ids, of which the last ones are trained.

    They are equally long, unless the plan's micro-batch is padded: then no two are, so that every one is.
    """
    import random

    dice = random.Random(0)
    micro = plan.micro_batch
    longest = plan.batch.tokens // micro
    trained = plan.batch.supervised // micro
    rows = []
    for number in range(STEPS * batch_size):
        length = max(2, longest - number) if plan.batch.padded else longest
        scored = max(1, min(length - 1, trained))
        ids = [dice.randrange(vocabulary) for _ in range(length)]
        rows.append(Encoded(ids, [IGNORED] * (length - scored) + ids[length - scored :]))
    return Rows.of(rows)
