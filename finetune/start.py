"""The beginning of a recipe: `finetune init` writes a commented one, `finetune recipes` lists the shipped ones."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe
from finetune.run import replace_text
from finetune.strict_yaml import quoted

_TEMPLATE = """\
# What: {title} of {model}.
# Card: run `finetune plan {path}` to see what it needs before you rent one.
# Expect: `finetune schema` describes every field; whatever is left out has a stated default.
model: {model_line}
method:
  kind: {kind}                    # full | lora | qlora
{adapter}data:
  train: {data}      # a file or glob (.jsonl, .json, .csv, .parquet), a hub data set, or home-intents
  eval: 0.05                    # a share of the rows, a path, or none
  max_length: 1024              # longest row in tokens
  overlong: error               # what happens to a longer row: error | drop | truncate-end
train:
  epochs: 1
  batch_size: 16                # rows per optimizer step over all devices
  micro_batch: auto             # rows per device and pass; the rest is accumulated
  learning_rate: {rate}
  optimizer: auto
"""
_ADAPTER = """\
  rank: 16
  alpha: 32                     # the change is scaled by alpha / rank
  targets: {targets}        # qv | attention | attention+mlp | a list of module names
"""
_TITLES = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


def write_recipe(path: Path, model: str, kind: str, data: str, targets: str) -> Path:
    """Write a commented recipe that the toolkit itself reads back without a fault.

    Raises `RecipeError` when a value is wrong or the file is there already.
    """
    adapter = "" if kind == "full" else _ADAPTER.format(targets=targets)
    text = _TEMPLATE.format(
        title=_TITLES.get(kind, kind),
        model=model,
        model_line=quoted(model),
        kind=kind,
        adapter=adapter,
        data=quoted(data),
        path=path,
        rate="1e-5" if kind == "full" else "2e-4",
    )
    parse_recipe(text, str(path))
    if path.exists():
        raise RecipeError(f"{path} is there already.", "Give another name, or remove it first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
    return path


def about_recipe(file: Path) -> tuple[str, str, str]:
    """What a recipe is, for which card, and what to expect: its first three comment lines."""
    found = {"What": "", "Card": "", "Expect": ""}
    for line in file.read_text(encoding="utf-8").splitlines()[:5]:
        key, _, text = line.lstrip("# ").partition(": ")
        if line.startswith("#") and key in found:
            found[key] = text.strip()
    return found["What"], found["Card"], found["Expect"]
