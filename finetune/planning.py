"""The verb `finetune plan`: one question answered from all sides, each side only when it is asked for.

Nothing here imports torch unless a trace, two real steps or the lengths of rows are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import fit as fitting
from finetune.compare import Row
from finetune.compare import compare as compare_all
from finetune.device import Device, named_device, this_device
from finetune.errors import DoesNotFit, InputError
from finetune.facts import Facts, read_facts
from finetune.fit import Fit
from finetune.paths import Lengths
from finetune.plan import Plan, resolve
from finetune.plan import require_fit as require_plan_fits
from finetune.recipe import Recipe, dump_recipe
from finetune.sharding import STRATEGIES, per_gpu
from finetune.vllm_rules import obstacle_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from finetune.measure import Measured
    from finetune.simulate import Simulation


@dataclass(frozen=True)
class Answer:
    """A plan and what was asked beside it. `recipe` has no "auto" left."""

    recipe: Recipe
    facts: Facts
    plan: Plan
    rows: int
    longest: int
    fit: Fit | None = None
    compared: Sequence[Row] = ()
    gpus: int = 1
    simulation: Simulation | None = None
    measured: Measured | None = None
    written: list[Path] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What is good to know before training and is not about memory."""
        why = obstacle_of(self.recipe.method)
        return [f"vLLM will not load this adapter, because {why}; merge it to serve it there."] if why else []

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        found = self.plan.document()
        if self.notes:
            found["notes"] = self.notes
        found["would_fit"] = {"rows": self.rows, "longest_row": self.longest}
        if self.fit is not None:
            found["changes"] = [vars(change) for change in self.fit.changes]
            found["needed"] = list(self.fit.needed)
            found["total_with_changes"] = self.fit.plan.total
        if self.compared:
            found["compared"] = [row.document() for row in self.compared]
        if self.gpus > 1:
            found["per_gpu"] = {name: _buckets(self, name) for name in STRATEGIES}
        if self.simulation is not None:
            found["simulated"] = self.simulation.document()
        if self.measured is not None:
            found["measured"] = self.measured.document()
        return found

    def views(self) -> Iterator[RenderableType]:
        """For a terminal."""
        from finetune import plan_view
        from finetune.report import measured_view, simulation_view

        if self.compared:
            yield plan_view.compare_view(self.compared, self.facts)
            return
        yield plan_view.plan_view(self.plan, self.fit, self.rows, self.longest)
        for note in self.notes:
            yield f"\n{note}"
        if self.gpus > 1:
            yield plan_view.sharding_view(self.plan, self.facts, self.gpus)
        if self.simulation is not None:
            yield simulation_view(self.simulation, self.plan)
        if self.measured is not None:
            yield measured_view(self.measured)

    def write(self, *, fit: Path | None, svg: Path | None, html: Path | None, name: str) -> None:
        """Write the files that were asked for. Raises `InputError` when a recipe would be overwritten."""
        from finetune import plan_page

        if fit is not None:
            if fit.exists():
                raise InputError(f"{fit} exists already.", "Name another file, or remove it.")
            recipe = self.fit.recipe if self.fit is not None else self.recipe
            fit.write_text(_recipe_text(recipe, self, name), encoding="utf-8")
        if svg is not None:
            svg.write_text(plan_page.plan_svg(self.plan), encoding="utf-8")
        if html is not None:
            html.write_text(plan_page.plan_html(self.plan, self.fit, self.compared or None), encoding="utf-8")

    def require_fit(self, written: Path | None) -> None:
        """Raise `DoesNotFit` when it does not, unless a recipe that does was written or a comparison was asked."""
        if self.compared or self.plan.fits:
            return
        if written is not None and self.fit is not None and self.fit.plan.fits:
            return
        try:
            require_plan_fits(self.plan)
        except DoesNotFit as error:
            if self.fit is not None and not self.fit.plan.fits:
                raise DoesNotFit(
                    error.what, "Nothing in the recipe would make it fit; take a smaller model."
                ) from None
            raise


def answer(
    recipe: Recipe,
    *,
    device: str = "auto",
    rows: str | None = None,
    compare: bool = False,
    ranks: Sequence[int] = (),
    gpus: int = 1,
    simulate: bool = False,
    verify: bool = False,
) -> Answer:
    """Plan a recipe, and what else is asked. `rows` names data whose lengths count, or "none".

    Raises `InputError` in two sentences for everything a user can put right.
    """
    facts = read_facts(recipe.model, recipe.load.revision)
    place = _place(device, gpus)
    lengths = _lengths(recipe, rows)
    resolved, plan = resolve(recipe, facts, place, lengths)
    fit = None if plan.fits else fitting.fit(resolved, facts, place, lengths)
    return Answer(
        resolved,
        facts,
        plan,
        fitting.most_rows(resolved, facts, place, lengths),
        fitting.longest_row(resolved, facts, place),
        fit,
        compare_all(recipe, facts, place, ranks, lengths) if compare else (),
        gpus,
        _simulated(resolved, facts, plan) if simulate else None,
        _measured(resolved, facts, plan, place) if verify else None,
    )


def _place(device: str, gpus: int) -> Device:
    from dataclasses import replace

    place = this_device() if device == "auto" else named_device(device)
    return replace(place, count=gpus) if gpus > 1 else place


def _lengths(recipe: Recipe, rows: str | None) -> Lengths | None:
    """Those of the rows that were named, else of the recipe's own where they and the tokenizer lie here."""
    if rows == "none" or (rows is None and _is_embedded(recipe)):
        return None
    from finetune import lengths

    if rows is None and not lengths.at_hand(recipe):
        return None
    return lengths.read_lengths(recipe, rows)


def _is_embedded(recipe: Recipe) -> bool:
    """Rows that come from a package are generated, which takes seconds: they count only when they are named."""
    return all(name.startswith("home-intents") or not Path(name).suffix for name in recipe.data.sources)


def _simulated(recipe: Recipe, facts: Facts, plan: Plan) -> Simulation:
    from finetune.simulate import simulate

    return simulate(facts, recipe.method, plan.batch, plan.path)


def _measured(recipe: Recipe, facts: Facts, plan: Plan, device: Device) -> Measured:
    from finetune.model import load_model, load_tokenizer, model_folder, real_device
    from finetune.verify import verify

    here = real_device()
    if (here.kind, here.count) != (device.kind, device.count):
        raise InputError(
            f"--verify runs on this machine's {here.name}, and the plan is for {device.name}.",
            "Leave --device and --gpus out.",
        )
    require_plan_fits(plan)
    folder = model_folder(recipe.model, recipe.load.revision)
    return verify(recipe, facts, plan, here, load_tokenizer(recipe), lambda: load_model(recipe, folder, facts))


def _buckets(answer: Answer, strategy: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for line in per_gpu(answer.plan, answer.facts, strategy, answer.gpus):
        totals[line.bucket] = totals.get(line.bucket, 0) + line.alive
    return totals


def _recipe_text(recipe: Recipe, answer: Answer, name: str) -> str:
    """The recipe as YAML under a few lines that say what it is."""
    plan = answer.fit.plan if answer.fit is not None else answer.plan
    verdict = "fits" if plan.fits else "does not fit"
    head = [
        f"# {name}, as `finetune plan` changed it for {plan.device.name}.",
        f"# Planned: {plan.total / 1e9:.1f} GB of {plan.device.memory / 1e9:.1f} GB, which {verdict}.",
    ]
    if answer.fit is not None:
        head.append(f"# Changed: {', '.join(answer.fit.needed) or 'nothing'}.")
    return "\n".join(head) + "\n" + dump_recipe(recipe)
