"""Changes that make a recipe fit: in order, as large as they say, and all of them needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.device import named_device
from finetune.facts import read_facts
from finetune.fit import fit, longest_row, most_rows
from finetune.plan import changed, planned, resolve
from finetune.recipe import Recipe, load_recipe, shipped_recipes

ORDER = (
    "train.micro_batch", "load.attention", "train.optimizer", "train.checkpointing", "method", "method.targets",
    "method.rank", "data.max_length",
)  # fmt: skip


def resolved(name: str, gigabytes: float, **sets: object) -> Recipe:
    recipe = load_recipe(name, [f"{key.replace('__', '.')}={value}" for key, value in sets.items()])
    return resolve(recipe, read_facts(recipe.model), named_device(f"{gigabytes}GB"))[0]


@settings(max_examples=25, deadline=None)
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
