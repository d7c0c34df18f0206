"""Write docs/recipe.md and the generated tables of README.md from the code they describe.

    python scripts/make_docs.py            write them
    python scripts/make_docs.py --check    fail when a file is not what this script writes

In README.md the text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced; the rest is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
from make_recipes import CARDS
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from finetune import recipe as fields
from finetune.cli import app
from finetune.device import Device
from finetune.facts import read_facts
from finetune.memory import static_lines
from finetune.method import trainable_parameters
from finetune.plan import Plan, plan
from finetune.recipe import Full, Optimizer, Recipe, load_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parent.parent
LAPTOP = Device("cpu", "CPU without bf16", 16 * 10**9, bf16=False)

SECTIONS: list[tuple[str, str, type[BaseModel]]] = [
    ("load", "load", fields.Load),
    ("method", "method, kind: full", Full),
    ("method", "method, kind: lora", fields.LoRA),
    ("method", "method, kind: qlora", fields.QLoRA),
    ("data", "data", fields.Data),
    ("train", "train", fields.Train),
    ("evaluate", "evaluate", fields.Evaluate),
    ("fast", "fast", fields.Fast),
    ("merge", "merge", fields.Merge),
    ("serve", "serve", fields.Serve),
]
OPTIMIZERS = {
    "adamw_torch_fused": "AdamW in one kernel. `auto` takes it on a CPU, and on a GPU for LoRA and full fine-tuning.",
    "adamw_torch": "The same AdamW without the fused kernel.",
    "adamw_8bit": "AdamW with moments in 8 bits; those of the embedding stay in fp32 (bitsandbytes).",
    "paged_adamw_8bit": "The same in unified memory: a peak moves it out. `auto` takes it for QLoRA on a GPU.",
    "paged_adamw_32bit": "AdamW with fp32 moments in unified memory.",
    "lion_8bit": "Lion, one moment in 8 bits. It wants a learning rate several times smaller than AdamW's.",
    "paged_lion_8bit": "The same in unified memory.",
    "adafactor": "Rows and columns of the second moment instead of the whole.",
    "sgd": "No state at all.",
}


# ----------------------------------------------------------------------------------------------------------- markdown


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A Markdown table; columns numbered in `right` are set flush right."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    lines = [header, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------- README.md's tables


def recipes_table() -> str:
    """Every shipped recipe with what the plan says about it."""
    rows = []
    for name, file in shipped_recipes().items():
        recipe = load_recipe(file)
        where, planned = _smallest(name)
        trained = f"{planned.trainable:,} ({100 * planned.trainable / planned.parameters:.3g} %)"
        targets = getattr(recipe.method, "targets", "every weight")
        rows.append([f"`{name}`", recipe.method.kind, str(targets), trained, where, f"{planned.total / 1e9:.1f} GB"])
    return table(
        ["recipe", "method", "trained layers", "trained parameters", "smallest card", "planned memory"],
        rows,
        (3, 4, 5),
    )


def _smallest(name: str) -> tuple[str, Plan]:
    """Where a recipe runs at the least: the embedded model on a CPU, the others on the smallest common card."""
    recipe = load_recipe(name)
    if recipe.model == "smollm2-135m":
        return "none (CPU)", plan(recipe, LAPTOP)
    for size in CARDS:
        if (planned := plan(recipe, f"{size}GB")).fits:
            return f"{size} GB", planned
    raise SystemExit(f"{name} fits on no card of {CARDS[-1]} GB")


def commands_table() -> str:
    """Every command in the order and the groups of `finetune --help`."""
    group: Any = typer.main.get_command(app)
    panels: dict[str, list[list[str]]] = {}
    for name, command in group.commands.items():
        said = (command.help or "").strip().splitlines()[0]
        panels.setdefault(str(command.rich_help_panel), []).append([f"`finetune {name}`", said])
    return "\n\n".join(f"{panel}:\n\n{table(['command', 'what it does'], rows)}" for panel, rows in panels.items())


def optimizers_table() -> str:
    """Every optimizer with the bytes it holds per trained parameter, measured on Gemma 2 2B's shapes."""
    if set(OPTIMIZERS) != set(get_args(Optimizer)):
        raise SystemExit(
            f"scripts/make_docs.py describes other optimizers than the recipe has: {get_args(Optimizer)}"
        )
    facts, method = read_facts("google/gemma-2-2b"), Full(kind="full")
    rows = []
    for name, said in OPTIMIZERS.items():
        lines = static_lines(method, facts, "float32", name)
        state = sum(line.bytes for line in lines if line.bucket == "optimizer") / trainable_parameters(method, facts)
        rows.append([f"`{name}`", f"{state:.2f}", said])
    return table(["optimizer", "bytes per trained parameter", ""], rows, (1,))


# ----------------------------------------------------------------------------------------------------- docs/recipe.md


def recipe_page() -> str:
    """docs/recipe.md as a whole."""
    parts = [
        "# The recipe, field by field",
        "This page is written by `scripts/make_docs.py` from the descriptions beside the fields in "
        "[finetune/recipe.py](../finetune/recipe.py). Editors get the same from "
        "[recipes/recipe.schema.json](../recipes/recipe.schema.json), and `finetune schema` prints it.",
        "Only `model`, `method.kind` and `data.train` have to be there. A field that is not listed here is refused, "
        "with the nearest right name. Every field can be set for one run: "
        "`finetune train RECIPE --set train.epochs=2`.",
        "## The whole",
        table(["field", "type", "default", ""], list(_rows("", Recipe))),
    ]
    for prefix, title, model in SECTIONS:
        parts += [f"## {title}", (model.__doc__ or "").strip()]
        parts.append(table(["field", "type", "default", ""], list(_rows(prefix, model))))
    return "\n\n".join(parts) + "\n"


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[list[str]]:
    for name, field in model.model_fields.items():
        full = f"{prefix}.{name}".lstrip(".")
        yield [f"`{full}`", words(field.annotation, field.metadata), _default(field), field.description or ""]


def words(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """A field's type as a reader says it: `auto` or whole number of at least 1."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return words(inner, [limit for item in extra for limit in _limits(item)])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, UnionType):
        parts = get_args(annotation)
        if all(isinstance(part, type) and issubclass(part, BaseModel) for part in parts):
            return "fields below"
        return " or ".join(dict.fromkeys(words(part, limits if part in (int, float) else ()) for part in parts))
    if origin is list:
        return f"list of {words(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "fields below"
    plain = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", NoneType: "`null`"}
    return plain[annotation] + _bounds(limits)


def _limits(item: Any) -> Sequence[Any]:
    return item.metadata if isinstance(item, FieldInfo) else [item]


def _bounds(limits: Sequence[Any]) -> str:
    said = []
    for limit in limits:
        for kind, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            if isinstance(limit, annotated_types.BaseMetadata) and getattr(limit, kind, None) is not None:
                said.append(f"{word} {getattr(limit, kind):,}")
    return f", {' and '.join(said)}" if said else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return ""
    value = field.default
    text = "null" if value is None else str(value).lower() if isinstance(value, (bool, list)) else str(value)
    if isinstance(value, float):
        text = f"{value:g}"
    return f"`{text}`"


# ------------------------------------------------------------------------------------------------------------ writing


def readme(text: str) -> str:
    """README.md with its generated parts made anew."""
    made = {"recipes": recipes_table(), "commands": commands_table(), "optimizers": optimizers_table()}
    for name, block in made.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"README.md needs one `<!-- begin {name} -->` and one `<!-- end {name} -->`.")
        text = pattern.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)  # type: ignore[misc]
    return text


def files() -> dict[Path, str]:
    """File -> the text it should hold."""
    page = ROOT / "README.md"
    return {page: readme(page.read_text(encoding="utf-8")), ROOT / "docs" / "recipe.md": recipe_page()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = {
        file: text for file, text in files().items() if not file.is_file() or file.read_text(encoding="utf-8") != text
    }
    if check and stale:
        names = ", ".join(str(file.relative_to(ROOT)) for file in stale)
        sys.exit(f"not what scripts/make_docs.py writes: {names}. Run it without --check.")
    for file, text in stale.items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
