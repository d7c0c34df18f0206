"""`init` writes recipes that load, and every shipped recipe says what it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.errors import RecipeError
from finetune.plan import plan
from finetune.recipe import Full, LoRA, QLoRA, load_recipe, shipped_recipes
from finetune.start import about_recipe, write_recipe

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("kind", "method", "rate"),
    [
        ("full", Full(kind="full"), 1e-5),
        ("lora", LoRA(kind="lora", rank=16, alpha=32, targets="qv"), 2e-4),
        ("qlora", QLoRA(kind="qlora", rank=16, alpha=32, targets="qv"), 2e-4),
    ],
)
def test_a_written_recipe_loads_and_plans(tmp_path: Path, kind: str, method: object, rate: float) -> None:
    file = write_recipe(tmp_path / "new" / "mine.yaml", "smollm2-135m", kind, "data/*.jsonl", "qv")
    recipe = load_recipe(file)
    assert (recipe.model, recipe.method, recipe.train.learning_rate) == ("smollm2-135m", method, rate)
    assert (recipe.data.train, recipe.data.eval) == ("data/*.jsonl", 0.05)
    assert plan(recipe, "24GB").fits
    assert all(about_recipe(file))


@pytest.mark.parametrize(
    "name", ["./my model #1", "a: b", "123", "1e-4", "'quoted'", "[x]", "C:\\models\\tiny", "*x"]
)
def test_any_name_is_written_as_it_is(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "a.yaml", name, "lora", name, "attention"))
    assert (recipe.model, recipe.data.train) == (name, name)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    with pytest.raises(RecipeError) as caught:
        write_recipe(file, "smollm2-135m", "lora", "home-intents", "qv")
    assert str(caught.value) == f"{file} is there already. Give another name, or remove it first."
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("lroa", "qv", r"method\.kind is 'lroa'; it must be full, lora or qlora\."),
        ("lora", "q_proj,v_proj", r"method\.targets cannot be 'q_proj,v_proj'.* Write a list as \[q_proj,v_proj\]\."),
    ],
)
def test_a_wrong_flag_leaves_no_file(tmp_path: Path, kind: str, targets: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        write_recipe(tmp_path / "a.yaml", "smollm2-135m", kind, "home-intents", targets)
    assert list(tmp_path.iterdir()) == []


def test_targets_may_be_a_list(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "a.yaml", "m/n", "lora", "x.jsonl", "[q_proj, v_proj]"))
    assert isinstance(recipe.method, LoRA)
    assert recipe.method.targets == ["q_proj", "v_proj"]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_says_what_it_is(name: str) -> None:
    lines = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# yaml-language-server: $schema=./recipe.schema.json"
    starts = [line.partition(":")[0] for line in lines[1:4]]
    assert starts == ["# What", "# Card", "# Expect"]
    what, card, expect = about_recipe(shipped_recipes()[name])
    assert all(text.endswith(".") and len(text) > 10 for text in (what, card, expect))
    planned = plan(name, "141GB")
    assert f"{planned.trainable:,} trained parameters" in expect


def test_three_models_with_five_methods_each() -> None:
    names = [name.partition("-") for name in shipped_recipes()]
    assert {model for model, _, _ in names} == {"gemma2b", "llama7b", "smollm2"}
    assert len(names) == 15
    for model in ("gemma2b", "llama7b", "smollm2"):
        assert {method for found, _, method in names if found == model} == {
            "full", "lora", "lora-attention", "lora-qv", "qlora",
        }  # fmt: skip


def test_the_recipes_folder_is_what_its_script_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_recipes.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((ROOT / "recipes").iterdir())) == 16
