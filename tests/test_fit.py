"""Changes that make a recipe fit: in order, as large as they say, and all of them needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.device import Device, named_device
from finetune.facts import Facts, read_facts
from finetune.fit import Fit, fit, longest_row, most_rows
from finetune.paths import Lengths
from finetune.plan import changed, planned, resolve
from finetune.recipe import Full, LoRA, QLoRA, Recipe, load_recipe, shipped_recipes

ORDER = (
    "train.micro_batch", "fast.weights", "load.attention", "train.optimizer", "train.checkpointing", "method",
    "method.targets", "method.rank", "data.max_length",
)  # fmt: skip


def resolved(name: str, gigabytes: float, **sets: object) -> Recipe:
    recipe = load_recipe(name, [f"{key.replace('__', '.')}={value}" for key, value in sets.items()])
    return resolve(recipe, read_facts(recipe.model), named_device(f"{gigabytes}GB"))[0]


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(sorted(n for n in shipped_recipes() if "smollm2" not in n)), st.integers(2, 90))
def test_every_answer_fits_or_says_that_nothing_does(name: str, gigabytes: int) -> None:
    recipe, device = resolved(name, gigabytes), named_device(f"{gigabytes}GB")
    facts = read_facts(recipe.model)
    answer = fit(recipe, facts, device)
    fields = [change.field for change in answer.changes]
    assert [ORDER.index(field) for field in dict.fromkeys(fields)] == sorted({ORDER.index(field) for field in fields})
    assert answer.plan == planned(answer.recipe, facts, device)
    assert answer.changes == () or answer.plan.fits == answer.changes[-1].fits
    again, plan = resolve(answer.recipe, facts, device)
    assert (again, plan.total) == (answer.recipe, answer.plan.total)


def test_every_change_says_what_it_gives() -> None:
    recipe, device = (
        resolved("llama7b-lora", 8, train__micro_batch=4, train__checkpointing="false"),
        named_device("8GB"),
    )
    facts = read_facts(recipe.model)
    answer = fit(recipe, facts, device)
    simple = [change for change in answer.changes if change.field != "method"]
    assert [change.field for change in simple][:3] == ["train.micro_batch", "train.micro_batch", "train.optimizer"]
    for change in simple:
        assert change.alone == planned(changed(recipe, change.field, change.value), facts, device).total
    assert [change.fits for change in answer.changes] == [False] * (len(answer.changes) - 1) + [True]
    assert answer.recipe.method.kind == "qlora"


def test_no_change_is_needless() -> None:
    recipe, device = (
        resolved("llama7b-lora", 24, train__micro_batch=8, train__checkpointing="false"),
        named_device("24GB"),
    )
    facts = read_facts(recipe.model)
    answer = fit(recipe, facts, device)
    assert answer.plan.fits
    for field in answer.needed:
        part, _, name = field.partition(".")
        before = getattr(getattr(recipe, part), name)
        assert not planned(changed(answer.recipe, field, before), facts, device).fits


@pytest.mark.parametrize(
    ("name", "card"), [("llama7b-qlora", "24GB"), ("gemma2b-lora", "48GB"), ("llama7b-lora", "80GB")]
)
def test_one_row_or_64_tokens_more_would_not_fit(name: str, card: str) -> None:
    recipe, device = resolved(name, float(card.removesuffix("GB"))), named_device(card)
    facts = read_facts(recipe.model)

    def fits(rows: int, length: int) -> bool:
        trial = changed(changed(recipe, "train.micro_batch", rows), "data.max_length", length)
        return planned(trial, facts, device).fits

    rows = most_rows(recipe, facts, device)
    assert fits(rows, 2048)
    assert not fits(rows + 1, 2048)
    longest = longest_row(recipe, facts, device)
    assert fits(1, longest)
    assert longest == facts.max_position or not fits(1, longest + 64)


def test_a_model_that_cannot_fit_at_all() -> None:
    recipe, device = resolved("llama7b-qlora", 3), named_device("3GB")
    facts = read_facts(recipe.model)
    assert not fit(recipe, facts, device).plan.fits
    assert (most_rows(recipe, facts, device), longest_row(recipe, facts, device)) == (0, 0)


# ---------------------------------------------------------------------------------------- any recipe, on any device

ASKED = st.lists(
    st.one_of(
        st.sampled_from([1, 2, 4, 8, 16]).map(lambda n: f"train.micro_batch={n}"),
        st.sampled_from(["false", "true", "2", "3", "7"]).map(lambda n: f"train.checkpointing={n}"),
        st.sampled_from(["sgd", "adafactor", "adamw_8bit", "adamw_torch", "paged_adamw_32bit"]).map(
            lambda name: f"train.optimizer={name}"
        ),
        st.sampled_from([100, 300, 1000, 4096]).map(lambda n: f"data.max_length={n}"),
        st.just("load.attention=eager"),
    ),
    max_size=3,
)


class Problem(NamedTuple):
    """A shipped recipe with settings, and a device that is about its size or too small."""

    name: str
    asked: list[str]
    gigabytes: float
    on_a_cpu: bool

    def posed(self) -> tuple[Recipe, Facts, Device]:
        """With every "auto" answered."""
        recipe = load_recipe(self.name, ["train.batch_size=16", *self.asked])
        device = named_device(f"{self.gigabytes:.2f}GB")
        if self.on_a_cpu:
            device = Device("cpu", "CPU", int(self.gigabytes * 1e9), bf16=False)
        facts = read_facts(recipe.model)
        return resolve(recipe, facts, device)[0], facts, device


LARGE, SMALL = ([n for n in sorted(shipped_recipes()) if n.startswith("smollm2") == small] for small in (False, True))
PROBLEMS = st.one_of(
    st.builds(Problem, st.sampled_from(LARGE), ASKED, st.floats(3, 60), st.just(False)),
    st.builds(Problem, st.sampled_from(SMALL), ASKED, st.floats(1, 6), st.booleans()),
)


def with_only(fields: Iterable[str], before: Recipe, answer: Recipe) -> Recipe:
    """The recipe before with some fields of the answer; what a new adapter leaves open has its defaults."""
    fields = list(fields)
    recipe = before
    if "method" in fields:
        old = before.method
        if isinstance(old, Full):
            own = type(answer.method)(kind=answer.method.kind)  # type: ignore[arg-type]
        else:
            own = QLoRA(**{**old.model_dump(), "kind": "qlora"})
        if isinstance(own, QLoRA) and isinstance(answer.method, QLoRA):
            own = own.model_copy(update={"compute_dtype": answer.method.compute_dtype})
        recipe = recipe.model_copy(update={"method": own})
        if isinstance(old, Full):
            recipe = changed(recipe, "load.dtype", answer.load.dtype)
    for field in fields:
        part, _, name = field.partition(".")
        if field != "method" and not (part == "method" and isinstance(recipe.method, Full)):
            recipe = changed(recipe, field, getattr(getattr(answer, part), name))
    return recipe


@settings(max_examples=6, deadline=None)
@given(PROBLEMS)
def test_what_is_needed_is_all_of_it_and_nothing_more(problem: Problem) -> None:
    recipe, facts, device = problem.posed()
    answer = fit(recipe, facts, device)
    if planned(recipe, facts, device).fits or not answer.plan.fits:
        return
    assert with_only(answer.needed, recipe, answer.recipe) == answer.recipe
    for field in answer.needed:
        fewer = [other for other in answer.needed if other != field]
        assert not planned(with_only(fewer, recipe, answer.recipe), facts, device).fits, field


def walked(answer: Fit, before: Recipe) -> list[Recipe]:
    """The recipes on the way, each with one change more."""
    found = [before]
    for change in answer.changes:
        recipe, value = found[-1], change.value
        if change.field == "method":
            kind: Any = {"lora": LoRA, "qlora": QLoRA}[value]
            own = {} if isinstance(recipe.method, Full) else recipe.method.model_dump()
            half = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[recipe.train.precision]
            extra = {"compute_dtype": half} if value == "qlora" else {}
            if isinstance(recipe.method, Full):
                recipe = changed(recipe, "load.dtype", half)
            recipe = recipe.model_copy(update={"method": kind(**{**own, "kind": value, **extra})})
        else:
            recipe = changed(recipe, change.field, value)
        found.append(recipe)
    return found[1:]


@settings(max_examples=6, deadline=None)
@given(PROBLEMS)
def test_changes_come_in_order_and_give_what_they_say(problem: Problem) -> None:
    recipe, facts, device = problem.posed()
    answer = fit(recipe, facts, device)
    # All weights are trained in full fine-tuning, so none can lie as in its file before the method is another one.
    order = [field for field in ORDER if field != "fast.weights"] if isinstance(recipe.method, Full) else list(ORDER)
    if isinstance(recipe.method, Full):
        order.insert(order.index("method") + 1, "fast.weights")
    places = [order.index(change.field) for change in answer.changes]
    assert places == sorted(places)
    for change, there in zip(answer.changes, walked(answer, recipe), strict=True):
        found = planned(there, facts, device)
        assert (change.together, change.fits) == (found.total, found.fits)
        assert change.cost
    assert not any(change.fits for change in answer.changes[:-1])


@settings(max_examples=8, deadline=None)
@given(
    PROBLEMS,
    st.one_of(st.none(), st.lists(st.tuples(st.integers(2, 900), st.just(1)), min_size=1, max_size=30)),
)
def test_rows_and_lengths_that_would_fit_are_the_most(problem: Problem, pairs: list[tuple[int, int]] | None) -> None:
    recipe, facts, device = problem.posed()
    lengths = Lengths.read(pairs, "rows") if pairs else None

    def fits(field: str, value: int, rows: Lengths | None, start: Recipe) -> bool:
        return planned(changed(start, field, value), facts, device, rows).fits

    rows = most_rows(recipe, facts, device, lengths)
    assert rows == 0 or fits("train.micro_batch", rows, lengths, recipe)
    assert not fits("train.micro_batch", rows + 1, lengths, recipe)
    longest, alone = longest_row(recipe, facts, device), changed(recipe, "train.micro_batch", 1)
    assert longest == 0 or fits("data.max_length", longest, None, alone)
    assert longest == facts.max_position or not fits("data.max_length", longest + 64, None, alone)


def test_the_most_rows_where_the_optimizer_s_step_costs_more_than_rows() -> None:
    """The first rows cost nothing then: they need what the step needs later anyway."""
    recipe = load_recipe("smollm2-full", ["data.max_length=256", "train.checkpointing=true"])
    facts, device = read_facts(recipe.model), Device("cpu", "CPU", 5_110_073_778, bf16=False)
    recipe, lengths = resolve(recipe, facts, device)[0], Lengths.read([(256, 1)] * 3, "rows")

    def fits(rows: int) -> bool:
        return planned(changed(recipe, "train.micro_batch", rows), facts, device, lengths).fits

    one, two = (planned(changed(recipe, "train.micro_batch", n), facts, device, lengths).total for n in (1, 2))
    assert one == two
    rows = most_rows(recipe, facts, device, lengths)
    assert 2 < rows < 1000
    assert [fits(rows), fits(rows + 1)] == [True, False]
